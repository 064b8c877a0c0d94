/* Every call that names a file below DELAYS_UNDER (or relative to the working folder) sleeps a seeded 0 to DELAYS_MOST
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
  kind name parameters                     \
  {                                        \
    delay(path);                           \
    return NEXT(name)(__VA_ARGS__);        \
  }
CALLS(FILE *, fopen, (const char *path, const char *mode), path, mode)
CALLS(FILE *, fopen64, (const char *path, const char *mode), path, mode)
CALLS(int, mkdir, (const char *path, mode_t mode), path, mode)
CALLS(int, unlink, (const char *path), path)
CALLS(int, unlinkat, (int dir, const char *path, int flags), dir, path, flags)
CALLS(int, rmdir, (const char *path), path)
CALLS(int, rename, (const char *path, const char *to), path, to)
CALLS(int, renameat, (int dir, const char *path, int to_dir, const char *to), dir, path, to_dir, to)
CALLS(int, stat, (const char *path, struct stat *st), path, st)
CALLS(int, lstat, (const char *path, struct stat *st), path, st)
CALLS(int, access, (const char *path, int mode), path, mode)
CALLS(DIR *, opendir, (const char *path), path)
