/* A stand-in for libnvidia-ml.so.1: simulated GPUs shared between processes, for tests only.
 *
 * The unmodified Python binding loads it through the dynamic loader (the SONAME must be libnvidia-ml.so.1).
 * State lives in the file that NVML_STANDIN_STATE names, behind a robust process-shared mutex, so a process that is
 * killed inside a call leaves the others working. NVML_STANDIN_GPUS lists the boards of a new state file, and
 * NVML_STANDIN_CLOCK=virtual stops time except for standin_advance(). Without NVML_STANDIN_STATE initialisation
 * answers "driver not loaded", as on a machine without a GPU. */
#include "nvml_standin_gpu.h"

/* ---- NVML: library ---- */

static ret_t initialise(void) {
  const char *path = getenv("NVML_STANDIN_STATE");
  if (!state && (!path || standin_open(path, getenv("NVML_STANDIN_GPUS")))) return DRIVER_NOT_LOADED;
  if (owner != getpid()) references = 0;
  owner = getpid();
  references++;
  return OK;
}

static int ready(void) { return references > 0 && owner == getpid(); }

ret_t nvmlInitWithFlags(unsigned flags) { (void)flags; return initialise(); }
ret_t nvmlInit_v2(void) { return initialise(); }

ret_t nvmlShutdown(void) {
  if (!ready()) return UNINITIALIZED;
  references--;
  return OK;
}

const char *nvmlErrorString(ret_t code) {
  switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

static ret_t copy(char *to, unsigned size, const char *from) {
  if (!to) return INVALID_ARGUMENT;
  if (size < strlen(from) + 1) return INSUFFICIENT_SIZE;
  strcpy(to, from);
  return OK;
}

ret_t nvmlSystemGetDriverVersion(char *to, unsigned size) {
  return ready() ? copy(to, size, "580.00.standin") : UNINITIALIZED;
}
ret_t nvmlSystemGetNVMLVersion(char *to, unsigned size) { return ready() ? copy(to, size, "13.580.00") : UNINITIALIZED; }

/* ---- NVML: handles ---- */

static gpu_t *gpu_of(void *handle) {
  char *address = handle;
  if (!state || address < (char *)state->gpu || address >= (char *)(state->gpu + state->count)) return 0;
  return &state->gpu[(address - (char *)state->gpu) / sizeof(gpu_t)];
}

static int mig_instance(const gpu_t *g, void *handle) { /* -1 for the whole GPU */
  return (char *)handle == (char *)g ? -1 : (int)((char *)handle - g->mig_handles);
}

static void mig_uuid(const gpu_t *g, int instance, char *to, size_t size) {
  snprintf(to, size, "MIG-%08x-0000-5000-8000-%012x", 0xfa4e0000u + (unsigned)(g - state->gpu), instance);
}

static ret_t health(const gpu_t *g) { return g->lost ? GPU_IS_LOST : g->unknown_error ? UNKNOWN : OK; }

ret_t nvmlDeviceGetCount_v2(unsigned *count) {
  if (!ready()) return UNINITIALIZED;
  if (!count) return INVALID_ARGUMENT;
  *count = state->count;
  return OK;
}

ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (!ready()) return UNINITIALIZED;
  if (!handle || index >= state->count) return INVALID_ARGUMENT;
  *handle = &state->gpu[index];
  return health(&state->gpu[index]);
}

ret_t nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  char name[96];
  if (!ready()) return UNINITIALIZED;
  if (!uuid || !handle) return INVALID_ARGUMENT;
  for (unsigned i = 0; i < state->count; i++) {
    gpu_t *g = &state->gpu[i];
    if (!strcmp(uuid, g->uuid)) {
      *handle = g;
      return health(g);
    }
    for (int k = 0; k < g->mig; k++) {
      mig_uuid(g, k, name, sizeof name);
      if (!strcmp(uuid, name)) {
        *handle = &g->mig_handles[k];
        return health(g);
      }
    }
  }
  return NOT_FOUND;
}

/* Every call on a device: initialised, known handle, healthy; then under the lock with time caught up. */
#define DEVICE_CALL(body)                   \
  if (!ready()) return UNINITIALIZED;       \
  gpu_t *g = gpu_of(handle);                \
  if (!g) return INVALID_ARGUMENT;          \
  ret_t code = health(g);                   \
  if (code) return code;                    \
  lock();                                   \
  advance(g);                               \
  body;                                     \
  unlock();                                 \
  return code

ret_t nvmlDeviceGetIndex(void *handle, unsigned *to) { DEVICE_CALL(*to = (unsigned)(g - state->gpu)); }
ret_t nvmlDeviceGetName(void *handle, char *to, unsigned size) { DEVICE_CALL(code = copy(to, size, preset_of(g)->name)); }
ret_t nvmlDeviceGetUUID(void *handle, char *to, unsigned size) {
  char name[96];
  DEVICE_CALL(int k = mig_instance(g, handle); if (k < 0) code = copy(to, size, g->uuid); else {
    mig_uuid(g, k, name, sizeof name);
    code = copy(to, size, name);
  });
}
ret_t nvmlDeviceGetArchitecture(void *handle, unsigned *to) { DEVICE_CALL(*to = preset_of(g)->arch); }
ret_t nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  DEVICE_CALL(*major = preset_of(g)->cc_major; *minor = preset_of(g)->cc_minor);
}

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
ret_t nvmlDeviceGetPciInfo_v3(void *handle, pci_t *to) {
  DEVICE_CALL(memset(to, 0, sizeof *to); strcpy(to->bus_id, g->bus_id); to->bus = 0x10 + (unsigned)(g - state->gpu));
}

ret_t nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
  DEVICE_CALL(if (preset_of(g)->cc_major < 8) code = NOT_SUPPORTED; else *current = *pending = g->mig > 0);
}
ret_t nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *to) {
  DEVICE_CALL(if (preset_of(g)->cc_major < 8) code = NOT_SUPPORTED; else *to = MAX_MIG);
}
ret_t nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **to) {
  DEVICE_CALL(if ((int)index >= g->mig) code = NOT_FOUND; else *to = &g->mig_handles[index]);
}
ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **to) { DEVICE_CALL(*to = g); }

/* ---- NVML: power, energy, limits ---- */

static unsigned reading_mw(const gpu_t *g, double watts) {
  return g->implausible_mw ? g->implausible_mw : (unsigned)lrint(1000 * watts);
}

ret_t nvmlDeviceGetPowerUsage(void *handle, unsigned *to) { DEVICE_CALL(*to = reading_mw(g, g->usage_w)); }
ret_t nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *to) {
  DEVICE_CALL(if (!g->energy_supported) code = NOT_SUPPORTED; else *to = (unsigned long long)(1000 * g->counter_j));
}
ret_t nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *to) { DEVICE_CALL(*to = enforced_mw(g)); }

#define LIMIT_CALL(body) DEVICE_CALL(if (!g->limit_supported) code = NOT_SUPPORTED; else { body; })
ret_t nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *to) { LIMIT_CALL(*to = g->requested_mw); }
ret_t nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *to) {
  LIMIT_CALL(*to = 1000 * preset_of(g)->default_w);
}
ret_t nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *lowest, unsigned *highest) {
  LIMIT_CALL(*lowest = g->min_mw; *highest = g->max_mw);
}

static ret_t set_limit(gpu_t *g, unsigned mw) {
  if (!state->permitted) return NO_PERMISSION;
  if (mw < g->min_mw || mw > g->max_mw) {
    state->refused_sets++;
    return INVALID_ARGUMENT;
  }
  state->set_calls++;
  if (g->silent_set) return OK;
  if (g->show_delay_ms) {
    g->late_mw = mw;
    g->late_at_s = now_s() + 0.001 * g->show_delay_ms;
  } else g->requested_mw = mw;
  return OK;
}

/* The delay comes before the change and the hold after it, so a caller can be killed on either side. */
ret_t nvmlDeviceSetPowerManagementLimit(void *handle, unsigned mw) {
  gpu_t *slow = gpu_of(handle);
  if (slow && slow->set_delay_ms) usleep(1000 * slow->set_delay_ms);
  if (!ready()) return UNINITIALIZED;
  if (!slow) return INVALID_ARGUMENT;
  ret_t code = health(slow);
  if (code) return code;
  lock();
  advance(slow);
  code = slow->limit_supported ? set_limit(slow, mw) : NOT_SUPPORTED;
  unlock();
  if (slow->set_hold_ms) usleep(1000 * slow->set_hold_ms);
  return code;
}

typedef struct { unsigned version; unsigned char scope; unsigned mw; } power_value_t;
ret_t nvmlDeviceSetPowerManagementLimit_v2(void *handle, power_value_t *value) {
  if (value->version != 0x0200000C) return VERSION_MISMATCH;
  LIMIT_CALL(code = value->scope ? NOT_SUPPORTED : set_limit(g, value->mw));
}

typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; } value_t;
typedef struct { unsigned id, scope; int64_t timestamp, latency; unsigned type, code; value_t value; } field_t;

static void fill_field(const gpu_t *g, field_t *f) {
  const preset_t *p = preset_of(g);
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  f->timestamp = t.tv_sec * 1000000LL + t.tv_nsec / 1000;
  f->type = 1; /* unsigned int */
  f->code = OK;
  f->value.ull = 0xdeadbeef; /* what a caller sees who does not check the code of each entry */
  if (f->scope != 0) {       /* only modules such as GH200 have further scopes */
    f->code = NOT_SUPPORTED;
    return;
  }
  switch (f->id) {
    case 83:
    case 191:
      f->type = 3; /* unsigned long long */
      if (g->energy_supported) f->value.ull = (unsigned long long)(1000 * g->counter_j);
      else f->code = NOT_SUPPORTED;
      break;
    case 185:
      if (p->has_average) f->value.ui = reading_mw(g, g->average_w);
      else f->code = NOT_SUPPORTED;
      break;
    case 186:
      if (g->instant_supported) f->value.ui = reading_mw(g, g->instant_w);
      else f->code = NOT_SUPPORTED;
      break;
    case 187: f->value.ui = g->min_mw; break;
    case 188: f->value.ui = g->max_mw; break;
    case 189: f->value.ui = 1000 * p->default_w; break;
    case 190: f->value.ui = enforced_mw(g); break;
    case 192: f->value.ui = g->requested_mw; break;
    default: f->code = NOT_SUPPORTED;
  }
}

ret_t nvmlDeviceGetFieldValues(void *handle, int count, field_t *fields) {
  DEVICE_CALL(for (int i = 0; i < count; i++) fill_field(g, &fields[i]));
}

/* ---- NVML: the rest that the project reads ---- */

ret_t nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *to) {
  DEVICE_CALL(if (type > 2) code = NOT_SUPPORTED; else *to = type == 2 ? preset_of(g)->memory_clock : (unsigned)lround(g->clock));
}
ret_t nvmlDeviceGetMaxClockInfo(void *handle, unsigned type, unsigned *to) {
  DEVICE_CALL(if (type > 2) code = NOT_SUPPORTED; else *to = type == 2 ? preset_of(g)->memory_clock : preset_of(g)->clock_max);
}
ret_t nvmlDeviceSetGpuLockedClocks(void *handle, unsigned lowest, unsigned highest) {
  DEVICE_CALL(if (!state->permitted) code = NO_PERMISSION; else if (lowest > highest) code = INVALID_ARGUMENT; else {
    g->locked_min = lowest;
    g->locked_max = highest;
  });
}
ret_t nvmlDeviceResetGpuLockedClocks(void *handle) {
  DEVICE_CALL(if (!state->permitted) code = NO_PERMISSION; else g->locked_min = g->locked_max = 0);
}
ret_t nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *to) {
  DEVICE_CALL(if (sensor) code = NOT_SUPPORTED; else *to = (unsigned)g->temperature_c);
}
typedef struct { unsigned gpu, memory; } utilization_t;
ret_t nvmlDeviceGetUtilizationRates(void *handle, utilization_t *to) {
  DEVICE_CALL(if (g->mig) code = NOT_SUPPORTED; else {
    to->gpu = 100 * g->load;
    to->memory = 40 * g->load;
  });
}
#ifndef OLD_DRIVER /* drivers before 535 only have the older name */
ret_t nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *to) { DEVICE_CALL(*to = g->reasons); }
#endif
ret_t nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *to) { DEVICE_CALL(*to = g->reasons); }
ret_t nvmlDeviceGetPersistenceMode(void *handle, unsigned *to) { DEVICE_CALL(*to = g->persistence); }

/* ---- hooks for tests; not part of NVML ---- */

void standin_advance(double seconds) {
  lock();
  state->virtual_now_s += seconds;
  for (unsigned i = 0; i < state->count; i++) advance(&state->gpu[i]);
  unlock();
}

typedef struct { const char *key; size_t offset; char type; } key_t_;
#define KEY(name, type) {#name, offsetof(gpu_t, name), type}
static const key_t_ KEYS[] = {
  KEY(load, 'd'), KEY(gain, 'd'), KEY(lost, 'i'), KEY(unknown_error, 'i'), KEY(mig, 'i'), KEY(persistence, 'i'),
  KEY(limit_supported, 'i'), KEY(energy_supported, 'i'), KEY(instant_supported, 'i'), KEY(silent_set, 'i'),
  KEY(stale_sensor, 'i'), KEY(implausible_mw, 'i'), KEY(set_delay_ms, 'i'), KEY(set_hold_ms, 'i'), KEY(show_delay_ms, 'i'),
  KEY(min_mw, 'i'), KEY(max_mw, 'i'), KEY(requested_mw, 'i'), KEY(out_of_band_mw, 'i'), KEY(locked_min, 'i'),
  KEY(locked_max, 'i'), KEY(clock, 'd'), KEY(power_w, 'd'), KEY(energy_j, 'd'),
};

static void *slot(gpu_t *g, const char *key, char *type) {
  for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++)
    if (!strcmp(key, KEYS[i].key)) {
      *type = KEYS[i].type;
      return (char *)g + KEYS[i].offset;
    }
  return 0;
}

/* Sets one value of a GPU, or the whole machine's `permitted`; `driver_reload` forgets limits and energy. */
int standin_set(unsigned index, const char *key, double value) {
  char type;
  int known = 1;
  lock();
  gpu_t *g = &state->gpu[index];
  advance(g);
  void *to = slot(g, key, &type);
  if (to && type == 'd') *(double *)to = value;
  else if (to) *(int *)to = (int)value;
  else if (!strcmp(key, "permitted")) state->permitted = (int)value;
  else if (!strcmp(key, "driver_reload")) {
    g->requested_mw = 1000 * preset_of(g)->default_w;
    g->energy_j = g->counter_j = 0;
    g->late_mw = 0;
    g->steps = 0;
    g->history_j[0] = 0;
    g->locked_min = g->locked_max = 0;
  } else known = 0;
  unlock();
  return known ? 0 : -1;
}

double standin_get(unsigned index, const char *key) {
  char type;
  lock();
  gpu_t *g = &state->gpu[index];
  advance(g);
  void *from = slot(g, key, &type);
  double value = !strcmp(key, "set_calls") ? state->set_calls : !strcmp(key, "refused_sets") ? state->refused_sets : NAN;
  if (from) value = type == 'd' ? *(double *)from : *(int *)from;
  unlock();
  return value;
}

size_t standin_sizeof(const char *name) {
  if (!strcmp(name, "pci")) return sizeof(pci_t);
  if (!strcmp(name, "field")) return sizeof(field_t);
  if (!strcmp(name, "field_value_offset")) return offsetof(field_t, value);
  if (!strcmp(name, "power_value")) return sizeof(power_value_t);
  if (!strcmp(name, "utilization")) return sizeof(utilization_t);
  return 0;
}
