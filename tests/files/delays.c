/* Every call that names a file below DELAYS_UNDER (or relative to a folder) sleeps a seeded 0 to DELAYS_MOST
 * microseconds first, so that the order between ranks differs each time. Preloaded before the library of oars, as
 * a site's own libraries are. */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static uint64_t state;

static void delay(const char *path)
{
  const char *under = getenv("DELAYS_UNDER"), *most = getenv("DELAYS_MOST"), *seed = getenv("DELAYS_SEED");
  if (!under || !most || !seed || !path || (*path == '/' && strncmp(path, under, strlen(under)))) return;
  if (!state) state = strtoull(seed, NULL, 10) * 2654435761u + (uint64_t)getpid() + 1;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  usleep((useconds_t)((state >> 33) % (uint64_t)atol(most)));
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name, ...)                                          \
  {                                                               \
    va_list list;                                                 \
    va_start(list, flags);                                        \
    mode_t mode = va_arg(list, mode_t);                           \
    va_end(list);                                                 \
    delay(path);                                                  \
    return NEXT(name)(__VA_ARGS__, mode);                         \
  }
int open(const char *path, int flags, ...) OPENS(open, path, flags)
int open64(const char *path, int flags, ...) OPENS(open64, path, flags)
int openat(int dir, const char *path, int flags, ...) OPENS(openat, dir, path, flags)
int openat64(int dir, const char *path, int flags, ...) OPENS(openat64, dir, path, flags)
#define CALLS(kind, name, parameters, ...) \
  kind name parameters;                    \
  kind name parameters                     \
  {                                        \
    delay(path);                           \
    return NEXT(name)(__VA_ARGS__);        \
  }
CALLS(int, __open_2, (const char *path, int flags), path, flags)
CALLS(int, __open64_2, (const char *path, int flags), path, flags)
CALLS(int, __openat_2, (int dir, const char *path, int flags), dir, path, flags)
CALLS(int, __openat64_2, (int dir, const char *path, int flags), dir, path, flags)
CALLS(int, creat, (const char *path, mode_t mode), path, mode)
CALLS(int, creat64, (const char *path, mode_t mode), path, mode)
CALLS(FILE *, fopen, (const char *path, const char *mode), path, mode)
CALLS(FILE *, fopen64, (const char *path, const char *mode), path, mode)
CALLS(FILE *, freopen, (const char *path, const char *mode, FILE *stream), path, mode, stream)
CALLS(FILE *, freopen64, (const char *path, const char *mode, FILE *stream), path, mode, stream)
CALLS(int, mkdir, (const char *path, mode_t mode), path, mode)
CALLS(int, mkdirat, (int dir, const char *path, mode_t mode), dir, path, mode)
CALLS(int, unlink, (const char *path), path)
CALLS(int, unlinkat, (int dir, const char *path, int flags), dir, path, flags)
CALLS(int, rmdir, (const char *path), path)
CALLS(int, remove, (const char *path), path)
CALLS(int, rename, (const char *path, const char *to), path, to)
CALLS(int, renameat, (int dir, const char *path, int to_dir, const char *to), dir, path, to_dir, to)
CALLS(int, renameat2, (int dir, const char *path, int to_dir, const char *to, unsigned flags),
      dir, path, to_dir, to, flags)
CALLS(int, link, (const char *path, const char *to), path, to)
CALLS(int, linkat, (int dir, const char *path, int to_dir, const char *to, int flags), dir, path, to_dir, to, flags)
CALLS(int, symlink, (const char *text, const char *path), text, path)
CALLS(int, symlinkat, (const char *text, int dir, const char *path), text, dir, path)
CALLS(ssize_t, readlink, (const char *path, char *text, size_t room), path, text, room)
CALLS(ssize_t, readlinkat, (int dir, const char *path, char *text, size_t room), dir, path, text, room)
CALLS(int, stat, (const char *path, struct stat *st), path, st)
CALLS(int, stat64, (const char *path, struct stat64 *st), path, st)
CALLS(int, lstat, (const char *path, struct stat *st), path, st)
CALLS(int, lstat64, (const char *path, struct stat64 *st), path, st)
CALLS(int, fstatat, (int dir, const char *path, struct stat *st, int flags), dir, path, st, flags)
CALLS(int, fstatat64, (int dir, const char *path, struct stat64 *st, int flags), dir, path, st, flags)
CALLS(int, statx, (int dir, const char *path, int flags, unsigned mask, struct statx *st), dir, path, flags, mask, st)
CALLS(int, access, (const char *path, int mode), path, mode)
CALLS(int, faccessat, (int dir, const char *path, int mode, int flags), dir, path, mode, flags)
CALLS(int, truncate, (const char *path, off_t length), path, length)
CALLS(int, truncate64, (const char *path, off64_t length), path, length)
CALLS(int, chmod, (const char *path, mode_t mode), path, mode)
CALLS(int, fchmodat, (int dir, const char *path, mode_t mode, int flags), dir, path, mode, flags)
CALLS(int, utimensat, (int dir, const char *path, const struct timespec times[2], int flags), dir, path, times, flags)
CALLS(int, chdir, (const char *path), path)
CALLS(DIR *, opendir, (const char *path), path)

/* The path that a system call names: its first argument, or its second behind a folder's descriptor. */
static const char *named_by(long number, const long *given)
{
  switch (number) {
#ifdef SYS_open
  case SYS_open:
  case SYS_creat:
  case SYS_stat:
  case SYS_lstat:
  case SYS_access:
  case SYS_mkdir:
  case SYS_rmdir:
  case SYS_unlink:
  case SYS_rename:
  case SYS_link:
  case SYS_readlink:
  case SYS_chmod:
#endif
  case SYS_truncate: return (const char *)given[0];
#ifdef SYS_symlink
  case SYS_symlink:
#endif
#ifdef SYS_renameat
  case SYS_renameat:
#endif
  case SYS_openat:
  case SYS_statx:
  case SYS_newfstatat:
  case SYS_faccessat:
  case SYS_mkdirat:
  case SYS_unlinkat:
  case SYS_renameat2:
  case SYS_linkat:
  case SYS_readlinkat:
  case SYS_fchmodat:
  case SYS_utimensat: return (const char *)given[1];
  case SYS_symlinkat: return (const char *)given[2];
  }
  return NULL;
}

long syscall(long number, ...)
{
  long given[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) given[i] = va_arg(list, long);
  va_end(list);
  delay(named_by(number, given));
  return NEXT(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
