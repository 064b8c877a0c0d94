/* Whose turn it is to change files: threads, children of this rank, and what is left of a voice that has died. */
#include "files.h"

int gate_fd = -1;        /* of this rank's own processes */
int turn_fd = -1;        /* of all processes of the voices */
volatile int children;   /* other processes write to our logs too */
static int turns;        /* guarded by gate_lock */
static lock gate_lock;

/* ---- processes and threads, one at a time ---- */

void expect_children(void)
{
  if (children || config.side == OFF) return;
  logs_are_read(); /* all of the journal is our own */
  children = 1;
}

void born_of_a_rank(void) { children = 1; }

EXPORT int oars_files_children(void) { return children; }

static int lock_file(int fd, short kind, int wait)
{
  struct flock how = {.l_type = kind, .l_whence = SEEK_SET};
  long result;
  do
    result = raw(SYS_fcntl, fd, wait ? F_SETLKW : F_SETLK, (long)&how, 0, 0, 0);
  while (wait && result == -EINTR);
  return result >= 0 || (result != -EACCES && result != -EAGAIN); /* else a file system without locks */
}

int gate_enter(signals *kept)
{
  *kept = signals_off();
  lock_take(&gate_lock);
  if (children) {
    lock_file(gate_fd, F_RDLCK, 1);
    news();
  }
  return config.side == OWN;
}

void gate_leave(signals *kept)
{
  if (children && gate_fd >= 0) lock_file(gate_fd, F_UNLCK, 0);
  lock_drop(&gate_lock);
  signals_back(*kept);
}

/* No thread and no child changes files meanwhile; who does not leave in time hangs, and is not waited for. */
int gate_alone(double seconds)
{
  double until = seconds_now() + seconds;
  int ours = lock_try(&gate_lock, seconds);
  while (children && !lock_file(gate_fd, F_WRLCK, 0) && seconds_now() < until) nap(1000);
  return ours;
}

void gate_open(void)
{
  if (children) lock_file(gate_fd, F_UNLCK, 0);
  lock_drop(&gate_lock);
}

/* Around a change by the voice, whose notes are one thread's at a time. A child of a voice that has died must not write
 * any more: the next voice waits for the turns of children that have begun. The rank itself it need not wait for. */
void turn_begin(signals *kept)
{
  int child = raw(SYS_getpid, 0, 0, 0, 0, 0, 0) != config.voice_pid;
  *kept = signals_off();
  lock_take(&gate_lock);
  if (child && turns++ == 0) lock_file(turn_fd, F_RDLCK, 1);
  news();
}

void turn_noted(signals *kept)
{
  lock_drop(&gate_lock);
  signals_back(*kept);
}

void turn_end(void)
{
  if (raw(SYS_getpid, 0, 0, 0, 0, 0, 0) == config.voice_pid) return;
  signals kept = signals_off();
  lock_take(&gate_lock);
  if (turns > 0 && --turns == 0) lock_file(turn_fd, F_UNLCK, 0);
  lock_drop(&gate_lock);
  signals_back(kept);
}

void turns_of_others_end(double seconds)
{
  double until = seconds_now() + seconds;
  while (!lock_file(turn_fd, F_WRLCK, 0) && seconds_now() < until) nap(1000);
  lock_file(turn_fd, F_UNLCK, 0);
}

void tables_before_fork(void)
{
  expect_children();
  lock_take(&gate_lock);
  tables_look(1);
}

void tables_after_fork(void)
{
  tables_look(0);
  lock_drop(&gate_lock);
}

