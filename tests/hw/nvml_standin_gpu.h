/* The simulated GPUs behind the NVML stand-in: presets, physics and the state that processes share.
 *
 * The physics is the same idea as the project's simulated device, written independently: a clock ladder that keeps
 * power under the cap every 168 ms with a fast path downwards, a first-order electrical response, a sensor that
 * publishes the mean of a window (a boxcar, so a step shows as a linear ramp), and a counter that integrates what
 * the sensor sees. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int ret_t;
enum {
  OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, VERSION_MISMATCH = 25, UNKNOWN = 999
};

#define MAX_GPUS 16
#define MAX_MIG 7
#define STEP_S 0.005
#define POLICY_S 0.168
#define TAU_S 0.012
#define HISTORY 256 /* more than 1 s of steps */
#define LONGEST_CATCH_UP_S 3600.0
#define MAGIC 0x57475331u

typedef struct {
  const char *kind, *name;
  unsigned cc_major, cc_minor, arch, min_w, default_w, max_w, clock_max, memory_clock;
  double clock_step, clock_floor; /* MHz; the policy never goes below the floor, so a low cap may not be held */
  double static_w, dynamic_w;     /* W at the highest clock */
  double period_s, instant_window_s, usage_window_s;
  int has_average, has_energy;
} preset_t;

/* Limits, clocks and sensor windows as published for these boards. The A40's floor makes a 100-W cap draw above it. */
static const preset_t PRESETS[] = {
  {"P100", "Tesla P100-PCIE-16GB", 6, 0, 4, 125, 250, 250, 1328, 715, 7.5, 544, 30, 200, .020, .010, .010, 0, 0},
  {"V100", "Tesla V100-SXM2-32GB", 7, 0, 5, 150, 300, 300, 1530, 877, 7.5, 405, 26, 242, .020, .010, .010, 0, 1},
  {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 7, 100, 400, 400, 1410, 1593, 15, 210, 56, 319, .100, .025, .025, 0, 1},
  {"A40", "NVIDIA A40", 8, 6, 7, 100, 300, 300, 1740, 7251, 15, 1080, 40, 226, .100, .100, 1.0, 1, 1},
  {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 9, 200, 700, 700, 1980, 2619, 15, 345, 100, 560, .100, .025, 1.0, 1, 1},
  {"H200", "NVIDIA H200", 9, 0, 9, 200, 700, 700, 1980, 3201, 15, 345, 100, 540, .100, .025, 1.0, 1, 1},
};

typedef struct {
  char uuid[96], bus_id[32];
  int preset;
  /* limits, mW */
  unsigned min_mw, max_mw, requested_mw, out_of_band_mw;
  unsigned locked_min, locked_max, late_mw; /* late: accepted, not shown or obeyed yet; 0 = none */
  double late_at_s;
  /* switches for tests */
  double load; /* 0 to 1 */
  double gain;
  unsigned implausible_mw, set_delay_ms, set_hold_ms, show_delay_ms;
  int lost, unknown_error, mig, persistence, limit_supported, energy_supported, instant_supported;
  int silent_set, stale_sensor;
  /* physics */
  double time_s, next_policy_s, next_publish_s, clock, power_w, temperature_c, energy_j, counter_j;
  double history_j[HISTORY]; /* cumulative true energy, one entry per step */
  unsigned long long steps, reasons;
  double instant_w, usage_w, average_w; /* as last published */
  char mig_handles[MAX_MIG];
} gpu_t;

typedef struct {
  uint32_t magic;
  pthread_mutex_t mutex;
  unsigned count, set_calls, refused_sets;
  int permitted, virtual_clock;
  double virtual_now_s;
  gpu_t gpu[MAX_GPUS];
} state_t;

static state_t *state;
static int references;
static pid_t owner; /* a forked child has to initialise again */

static double now_s(void) {
  struct timespec t;
  if (state->virtual_clock) return state->virtual_now_s;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void lock(void) {
  if (pthread_mutex_lock(&state->mutex) == EOWNERDEAD) pthread_mutex_consistent(&state->mutex);
}

static void unlock(void) { pthread_mutex_unlock(&state->mutex); }

/* ---- physics ---- */

static const preset_t *preset_of(const gpu_t *g) { return &PRESETS[g->preset]; }

static unsigned enforced_mw(const gpu_t *g) {
  return g->out_of_band_mw && g->out_of_band_mw < g->requested_mw ? g->out_of_band_mw : g->requested_mw;
}

static double power_at(const gpu_t *g, double clock) {
  const preset_t *p = preset_of(g);
  double x = clock / p->clock_max, knee = 0.72, floor_v = 0.80;
  double v = x < knee ? floor_v : floor_v + (1 - floor_v) * (x - knee) / (1 - knee);
  return v * v * (p->static_w + p->dynamic_w * g->load * x);
}

static double clock_under(const gpu_t *g, double power_w, double highest) {
  const preset_t *p = preset_of(g);
  double clock = highest;
  while (clock - p->clock_step >= p->clock_floor && power_at(g, clock) > power_w) clock -= p->clock_step;
  return clock;
}

static double window_mean(const gpu_t *g, double window_s) {
  unsigned long long n = (unsigned long long)lrint(window_s / STEP_S);
  if (n > g->steps) n = g->steps;
  if (n == 0) return g->power_w;
  return (g->history_j[g->steps % HISTORY] - g->history_j[(g->steps - n) % HISTORY]) / (n * STEP_S);
}

static void set_clock(gpu_t *g, double t) {
  const preset_t *p = preset_of(g);
  double cap = enforced_mw(g) / 1000.0, highest = p->clock_max;
  if (g->locked_max && g->locked_max < highest) highest = g->locked_max;
  if (g->clock > highest) g->clock = highest;
  if (t >= g->next_policy_s) {
    double wanted = clock_under(g, 0.98 * cap, highest);
    g->next_policy_s = t + POLICY_S;
    g->clock = wanted < g->clock ? wanted : g->clock + 0.75 * (wanted - g->clock);
    g->reasons = (wanted < highest - 1 ? 0x4 : 0) | (g->load < 0.01 ? 0x1 : 0);
  } else if (g->power_w > 1.02 * cap) {
    double wanted = clock_under(g, 0.95 * cap, highest);
    if (wanted < g->clock) g->clock = wanted;
    g->reasons |= 0x4;
  }
  if (g->locked_min > g->clock && power_at(g, g->locked_min) <= cap) g->clock = g->locked_min;
}

static void publish(gpu_t *g, double t) {
  const preset_t *p = preset_of(g);
  g->next_publish_s += p->period_s;
  if (g->next_publish_s <= t) g->next_publish_s = t + p->period_s;
  if (g->stale_sensor) return;
  g->instant_w = g->gain * window_mean(g, p->instant_window_s);
  g->usage_w = g->gain * window_mean(g, p->usage_window_s);
  g->average_w = g->gain * window_mean(g, 1.0);
  g->counter_j = g->gain * g->energy_j;
}

static void advance(gpu_t *g) {
  double now = now_s();
  if (now - g->time_s > LONGEST_CATCH_UP_S) g->time_s = now - LONGEST_CATCH_UP_S;
  if (g->late_mw && now >= g->late_at_s) {
    g->requested_mw = g->late_mw;
    g->late_mw = 0;
  }
  while (g->time_s + STEP_S <= now) {
    double t = g->time_s + STEP_S;
    set_clock(g, t);
    g->power_w += (power_at(g, g->clock) - g->power_w) * (1 - exp(-STEP_S / TAU_S));
    g->energy_j += g->power_w * STEP_S;
    g->temperature_c += (30 + 0.055 * g->power_w - g->temperature_c) * (STEP_S / 20.0);
    g->steps++;
    g->history_j[g->steps % HISTORY] = g->energy_j;
    g->time_s = t;
    if (t >= g->next_publish_s) publish(g, t);
  }
}

/* ---- shared state ---- */

static void create_gpu(gpu_t *g, int index, int preset) {
  const preset_t *p = &PRESETS[preset];
  memset(g, 0, sizeof *g);
  snprintf(g->uuid, sizeof g->uuid, "GPU-%08x-0000-4000-8000-%012x", 0xfa4e0000u + index, index);
  snprintf(g->bus_id, sizeof g->bus_id, "00000000:%02X:00.0", 0x10 + index);
  g->preset = preset;
  g->min_mw = 1000 * p->min_w;
  g->max_mw = 1000 * p->max_w;
  g->requested_mw = 1000 * p->default_w;
  g->gain = 1;
  g->persistence = g->limit_supported = g->instant_supported = 1;
  g->energy_supported = p->has_energy;
  g->clock = p->clock_max;
  g->temperature_c = 35;
  g->power_w = power_at(g, g->clock);
  g->instant_w = g->usage_w = g->average_w = g->power_w;
  g->time_s = now_s();
  g->next_policy_s = g->time_s;
  g->next_publish_s = g->time_s + p->period_s * (0.1 + 0.17 * (index % 5));
}

static void create_state(const char *gpus) {
  char kinds[256], *rest;
  const char *clock = getenv("NVML_STANDIN_CLOCK");
  pthread_mutexattr_t attributes;
  memset(state, 0, sizeof *state);
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&state->mutex, &attributes);
  state->permitted = 1;
  state->virtual_clock = clock && !strcmp(clock, "virtual");
  snprintf(kinds, sizeof kinds, "%s", gpus ? gpus : "H100,A100");
  for (char *kind = strtok_r(kinds, ",", &rest); kind && state->count < MAX_GPUS; kind = strtok_r(0, ",", &rest))
    for (int i = 0; i < (int)(sizeof PRESETS / sizeof *PRESETS); i++)
      if (!strcmp(kind, PRESETS[i].kind)) {
        create_gpu(&state->gpu[state->count], state->count, i);
        state->count++;
      }
  state->magic = MAGIC;
}

/* Maps a state file, and creates it when it is new; a test process may go from one file to the next. */
int standin_open(const char *path, const char *gpus) {
  int fd = open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0) return -1;
  flock(fd, LOCK_EX); /* one process creates, the others wait */
  if (state) munmap(state, sizeof(state_t));
  state = 0;
  if (ftruncate(fd, sizeof(state_t)) == 0) {
    void *mapped = mmap(0, sizeof(state_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) state = mapped;
  }
  if (state && state->magic != MAGIC) create_state(gpus);
  flock(fd, LOCK_UN); /* the mapping keeps the open file, and with it the lock, alive */
  close(fd);
  return state ? 0 : -1;
}
