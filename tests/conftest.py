"""What every test relies on."""

import signal

# A job started in the background or under nohup inherits ignored signals and hands them on to the processes that tests
# start; those would then sit out the very signal they are tested with.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
