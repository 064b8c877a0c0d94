/* System calls and memory without libc, so that they work before main, in signal handlers and after vfork. */
#include "files.h"
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

void *raw_by;

#if defined(__x86_64__)
long raw(long number, long a, long b, long c, long d, long e, long f)
{
  long result;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  void *by = raw_by;
  if (by) /* below what the compiler may keep under the stack pointer */
    __asm__ volatile("lea -128(%%rsp), %%rsp\n\tcall *%[by]\n\tlea 128(%%rsp), %%rsp"
                     : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9), [by] "r"(by)
                     : "rcx", "r11", "memory");
  else
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
  return result;
}
#elif defined(__aarch64__)
long raw(long number, long a, long b, long c, long d, long e, long f)
{
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = f;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  return x0;
}
#else
#error "manyoars' file library knows the system calls of x86-64 and aarch64 only"
#endif

long border(long result)
{
  if (result < 0 && result > -4096) {
    errno = (int)-result;
    return -1;
  }
  return result;
}

/* ---- paths longer than the kernel takes at once: below an open folder ---- */

struct at { int fd; const char *rest; };

static struct at at(const char *path)
{
  struct at a = {AT_FDCWD, path};
  while (strlen(a.rest) >= PATH_MAX) {
    char head[PATH_MAX];
    size_t cut = PATH_MAX - 1;
    while (cut > 0 && a.rest[cut] != '/') cut--;
    if (cut == 0) break; /* the kernel says that a name is too long */
    memcpy(head, a.rest, cut);
    head[cut] = 0;
    int fd = (int)raw(SYS_openat, a.fd, (long)head, O_PATH | O_DIRECTORY | O_CLOEXEC, 0, 0, 0);
    if (a.fd != AT_FDCWD) sys_close(a.fd);
    a.fd = fd; /* -errno makes the call that comes fail with EBADF; see failed() */
    if (fd < 0) break;
    a.rest += cut;
    while (*a.rest == '/') a.rest++;
  }
  return a;
}

static long done(struct at a, long result)
{
  if (a.fd < 0 && a.fd != AT_FDCWD) return a.fd;
  if (a.fd != AT_FDCWD) sys_close(a.fd);
  return result;
}

int sys_openat(int dirfd, const char *path, int flags, mode_t mode)
{
  return (int)raw(SYS_openat, dirfd, (long)path, flags, mode, 0, 0);
}

int sys_open(const char *path, int flags, mode_t mode)
{
  struct at a = at(path);
  return (int)done(a, sys_openat(a.fd, a.rest, flags, mode));
}

int sys_stat(const char *path, struct stat *st, int flags)
{
  struct at a = at(path);
  return (int)done(a, raw(SYS_newfstatat, a.fd, (long)a.rest, (long)st, flags, 0, 0));
}

int sys_access(const char *path, int mode, int flags)
{
  struct at a = at(path);
  long result = raw(SYS_faccessat2, a.fd, (long)a.rest, mode, flags, 0, 0);
  if (result == -ENOSYS || (result == -EPERM && flags)) /* Linux before 5.8, and containers that do not know it */
    result = raw(SYS_faccessat, a.fd, (long)a.rest, mode, 0, 0, 0);
  return (int)done(a, result);
}

int sys_mkdir(const char *path, mode_t mode)
{
  struct at a = at(path);
  return (int)done(a, raw(SYS_mkdirat, a.fd, (long)a.rest, mode, 0, 0, 0));
}

int sys_unlink(const char *path, int flags)
{
  struct at a = at(path);
  return (int)done(a, raw(SYS_unlinkat, a.fd, (long)a.rest, flags, 0, 0, 0));
}

int sys_rename(const char *from, const char *to, unsigned flags)
{
  struct at a = at(from), b = at(to);
  long result = raw(SYS_renameat2, a.fd, (long)a.rest, b.fd, (long)b.rest, flags, 0);
#ifdef SYS_renameat
  if (result == -ENOSYS && !flags) result = raw(SYS_renameat, a.fd, (long)a.rest, b.fd, (long)b.rest, 0, 0);
#endif
  return (int)done(b, done(a, result));
}

int sys_link(const char *from, const char *to, int flags)
{
  struct at a = at(from), b = at(to);
  return (int)done(b, done(a, raw(SYS_linkat, a.fd, (long)a.rest, b.fd, (long)b.rest, flags, 0)));
}

int sys_symlink(const char *text, const char *path)
{
  struct at a = at(path);
  return (int)done(a, raw(SYS_symlinkat, (long)text, a.fd, (long)a.rest, 0, 0, 0));
}

int sys_chmod(const char *path, mode_t mode)
{
  struct at a = at(path);
  return (int)done(a, raw(SYS_fchmodat, a.fd, (long)a.rest, mode, 0, 0, 0));
}

int sys_chown(const char *path, uid_t uid, gid_t gid, int flags)
{
  struct at a = at(path);
  return (int)done(a, raw(SYS_fchownat, a.fd, (long)a.rest, uid, gid, flags, 0));
}

int sys_times(const char *path, const struct timespec *times, int flags)
{
  struct at a = at(path);
  return (int)done(a, raw(SYS_utimensat, a.fd, (long)a.rest, (long)times, flags, 0, 0));
}

long sys_readlink(const char *path, char *text, size_t room)
{
  struct at a = at(path);
  long length = done(a, raw(SYS_readlinkat, a.fd, (long)a.rest, (long)text, (long)room - 1, 0, 0));
  if (length >= 0) text[length] = 0;
  return length;
}

int sys_close(int fd) { return (int)raw(SYS_close, fd, 0, 0, 0, 0, 0); }

long sys_write(int fd, const void *data, size_t length)
{
  return raw(SYS_write, fd, (long)data, (long)length, 0, 0, 0);
}

int sys_make_folders(const char *path)
{
  int result = sys_mkdir(path, 0777);
  if (result != -ENOENT) return result == -EEXIST ? 0 : result;
  char *copy = (char *)raw(SYS_mmap, 0, BIG, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if ((long)copy < 0 && (long)copy > -4096) return -ENOMEM;
  size_t length = strlen(path);
  memcpy(copy, path, length + 1);
  for (size_t i = 1; i <= length; i++)
    if (copy[i] == '/' || copy[i] == 0) {
      copy[i] = 0;
      result = sys_mkdir(copy, 0777);
      if (result < 0 && result != -EEXIST) break;
      result = 0;
      if (i < length) copy[i] = '/';
    }
  raw(SYS_munmap, (long)copy, BIG, 0, 0, 0, 0);
  return result;
}

/* What we copy and write down for a script is not among the files whose size it has limited (RLIMIT_FSIZE): the limit
 * is lifted meanwhile, by whoever has the gate. Where it may not be, nothing is begun: a write would be a deadly
 * signal. */
int limits_lift(limits *kept, uint64_t size)
{
  if (raw(SYS_prlimit64, 0, RLIMIT_FSIZE, 0, (long)kept, 0, 0) < 0) kept->soft = kept->hard = (uint64_t)RLIM_INFINITY;
  if (size > kept->hard) return -EFBIG;
  limits lifted = {kept->hard, kept->hard};
  if (kept->soft != kept->hard) raw(SYS_prlimit64, 0, RLIMIT_FSIZE, (long)&lifted, 0, 0, 0);
  return 0;
}

void limits_back(const limits *kept)
{
  if (kept->soft != kept->hard) raw(SYS_prlimit64, 0, RLIMIT_FSIZE, (long)kept, 0, 0, 0);
}

int copy_contents(int from, int to)
{
  for (;;) { /* shares blocks where the file system can */
    long n = raw(SYS_copy_file_range, from, 0, to, 0, 1 << 24, 0);
    if (n == 0) return 0;
    if (n < 0) {
      if (n == -ENOSPC || n == -EDQUOT || n == -EFBIG) return (int)n;
      break;
    }
  }
  size_t room = 1 << 20;
  char *data = (char *)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if ((long)data < 0 && (long)data > -4096) return -ENOMEM;
  long n = 1, wrote = 0;
  while (wrote >= 0 && (n = raw(SYS_read, from, (long)data, (long)room, 0, 0, 0)) > 0)
    for (long at_ = 0; at_ < n && wrote >= 0; at_ += wrote) wrote = sys_write(to, data + at_, (size_t)(n - at_));
  if (wrote < 0) n = wrote;
  raw(SYS_munmap, (long)data, (long)room, 0, 0, 0, 0);
  return n < 0 ? (int)n : 0;
}

int copy_file(int from, const char *path, int empty)
{
  struct stat was;
  int result = (int)raw(SYS_fstat, from, (long)&was, 0, 0, 0, 0);
  limits kept;
  if (result >= 0) result = limits_lift(&kept, empty ? 0 : (uint64_t)was.st_size);
  if (result < 0) return result;
  int to = sys_open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (to >= 0 && !empty) result = copy_contents(from, to);
  limits_back(&kept);
  if (to < 0) return to;
  if (result >= 0) result = (int)raw(SYS_fchmod, to, was.st_mode & 07777, 0, 0, 0, 0);
  if (result >= 0 && !empty) {
    struct timespec times[2] = {was.st_atim, was.st_mtim};
    raw(SYS_utimensat, to, 0, (long)times, 0, 0, 0);
  }
  sys_close(to);
  if (result < 0) sys_unlink(path, 0);
  return result;
}

/* ---- memory ---- */

static lock arena_lock;
static char *arena_at, *arena_end;

void *arena(size_t bytes)
{
  bytes = (bytes + 15) & ~(size_t)15;
  lock_take(&arena_lock);
  if ((size_t)(arena_end - arena_at) < bytes) {
    size_t room = bytes > (1 << 20) ? bytes : 1 << 20;
    char *more = (char *)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if ((long)more < 0 && (long)more > -4096) { /* no memory at all: nothing sensible can go on */
      static const char say[] = "oars: no memory for the table of files\n";
      sys_write(2, say, sizeof say - 1);
      raw(SYS_exit_group, 70, 0, 0, 0, 0, 0);
    }
    arena_at = more;
    arena_end = more + room;
  }
  char *result = arena_at;
  arena_at += bytes;
  lock_drop(&arena_lock);
  return result;
}

void arena_look(int begin)
{
  if (begin)
    lock_take(&arena_lock);
  else
    lock_drop(&arena_lock);
}

/* Buffers of an operation: too large for the stack of a signal handler or of a small thread. */
static struct work *volatile works[64];
static volatile uint64_t taken;

struct work *work_begin(void)
{
  for (;;) {
    uint64_t now = taken;
    if (~now == 0) { /* more threads at once than there are buffers */
      nap(50);
      continue;
    }
    int i = __builtin_ctzll(~now);
    if (!__sync_bool_compare_and_swap(&taken, now, now | (uint64_t)1 << i)) continue;
    if (!works[i]) works[i] = arena(sizeof(struct work));
    return works[i];
  }
}

void work_end(struct work *w)
{
  for (int i = 0; i < 64; i++)
    if (works[i] == w) {
      __sync_fetch_and_and(&taken, ~((uint64_t)1 << i));
      return;
    }
}

void work_forked(void) { taken = 0; } /* other threads are not there any more */

/* ---- waiting ---- */

void nap(long microseconds)
{
  struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
  raw(SYS_nanosleep, (long)&time, 0, 0, 0, 0, 0);
}

double seconds_now(void)
{
  struct timespec now;
  raw(SYS_clock_gettime, CLOCK_MONOTONIC, (long)&now, 0, 0, 0, 0);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A handler that uses files must not meet a lock that its own thread holds. Within such a part others cost nothing. */
static __thread int parts;

signals signals_off(void)
{
  signals kept = {0};
  uint64_t all = ~(uint64_t)0;
  if (!parts) raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, (long)&kept.before, 8, 0, 0);
  parts++; /* only now: a handler before this is outside */
  return kept;
}

void signals_back(signals kept)
{
  if (!--parts) raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&kept.before, 0, 8, 0, 0);
}

void signal_taken(int number)
{
  uint64_t set = (uint64_t)1 << (number - 1);
  struct timespec at_once = {0, 0};
  raw(SYS_rt_sigtimedwait, (long)&set, 0, (long)&at_once, 8, 0, 0);
}

void lock_take(lock *l)
{
  for (int tries = 0; __sync_lock_test_and_set(&l->held, 1);)
    if (++tries < 100)
      __asm__ volatile("" ::: "memory");
    else
      nap(20);
}

int lock_try(lock *l, double seconds)
{
  if (!__sync_lock_test_and_set(&l->held, 1)) return 1;
  double until = seconds_now() + seconds;
  while (__sync_lock_test_and_set(&l->held, 1)) {
    if (seconds_now() > until) return 0;
    nap(20);
  }
  return 1;
}

void lock_drop(lock *l) { __sync_lock_release(&l->held); }
