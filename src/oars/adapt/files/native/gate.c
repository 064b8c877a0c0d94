/* Whose turn it is to change files: threads, children of this rank, and what is left of a voice that has died. */
#include "files.h"

int gate_fd = -1;        /* of this rank's own processes */
int order_fd = -1;       /* of these too */
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

/* Wait for gate_lock, for a promotion perhaps, which is Python code: whoever waits long lets go of the interpreter. Not
 * all C code does so by itself before it opens a file. Nobody waits for the interpreter with the lock in his hand. */
static void gate_take(void)
{
  static int (*ready)(void), (*has)(void);
  static void *(*let_go)(void), (*back)(void *);
  while (!lock_try(&gate_lock, 0.05)) {
    if (!back) {
      ready = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
      has = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
      let_go = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
      back = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    }
    void *state = ready && has && let_go && back && ready() && has() ? let_go() : NULL;
    gate_pass();
    if (state) back(state);
  }
}

/* Until nobody changes files. */
void gate_pass(void)
{
  while (gate_lock.held) nap(1000);
}

/* The gate is open to several processes of a rank. Two that change the same file first would both copy it, and one copy
 * would be lost: in here they are one at a time, while gate_lock is held too. A process that was stopped in here keeps
 * the others back once, not for ever. */
static void order_begin(void)
{
  static double patience = 10; /* seconds; guarded by gate_lock */
  if (!children) return;
  for (double until = seconds_now() + patience; !lock_file(order_fd, F_WRLCK, 0); nap(50))
    if (seconds_now() > until) {
      patience = 0;
      return;
    }
  patience = 10;
}

static void order_end(void)
{
  if (children) lock_file(order_fd, F_UNLCK, 0);
}

int gate_enter(signals *kept)
{
  *kept = signals_off();
  gate_take();
  if (children) {
    lock_file(gate_fd, F_RDLCK, 1);
    order_begin();
    news();
  }
  return config.side == OWN;
}

void gate_leave(signals *kept)
{
  order_end();
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
  gate_take();
  if (child && turns++ == 0) lock_file(turn_fd, F_RDLCK, 1);
  order_begin();
  news();
}

void turn_noted(signals *kept)
{
  order_end();
  lock_drop(&gate_lock);
  signals_back(*kept);
}

void turn_end(void)
{
  if (raw(SYS_getpid, 0, 0, 0, 0, 0, 0) == config.voice_pid) return;
  signals kept = signals_off();
  gate_take();
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

/* Another thread may hold any of these, and is not there in the child to drop it. */
void tables_before_fork(void)
{
  expect_children();
  gate_take();
  tables_look(1);
  listings_look(1);
  shells_look(1);
  arena_look(1);
}

void tables_after_fork(void)
{
  arena_look(0);
  shells_look(0);
  listings_look(0);
  tables_look(0);
  lock_drop(&gate_lock);
}

