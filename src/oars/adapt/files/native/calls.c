/* libc's functions that open a file or look at one. */
#include "files.h"

#define ALIAS(name) __attribute__((alias(#name), visibility("default")))
#define SAME(to, from) extern __typeof__(from) to ALIAS(from)

enum { WRITES = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC };

/* ---- opening ---- */

static int look_open(struct work *w, int flags, mode_t mode)
{
  struct place *p = &w->a;
  int follow = (flags & O_PATH) && !(flags & O_NOFOLLOW), fd;
  for (;;) {
    unsigned seen = news_number;
    fd = find(w, p, w->first, follow);
    if (fd >= 0)
      fd = p->state == ABSENT ? -ENOENT : sys_open(p->target, p->state == THROUGH ? flags : flags | O_NOFOLLOW, mode);
    news();
    if (seen == news_number) {
      int link = fd == -ELOOP || (fd == -ENOTDIR && flags & O_DIRECTORY);
      if (!link || follow || flags & O_NOFOLLOW) return fd;
      follow = 1;
      continue;
    }
    if (fd >= 0) sys_close(fd);
    forget_ways();
  }
}

int do_open(int dirfd, const char *path, int flags, mode_t mode)
{
  int writes = (flags & WRITES) && !(flags & O_PATH);
  if (!active() || (config.side == VOICE && !writes)) return sys_openat(dirfd, path, flags, mode);
  struct work *w = work_begin();
  int result = NOW_VOICE;
  if (absolute(dirfd, path, w->first) < 0)
    result = sys_openat(dirfd, path, flags, mode);
  else {
    if (config.side == OWN) result = writes ? own_open(w, w->first, flags, mode) : look_open(w, flags, mode);
    if (result == NOW_VOICE) {
      signals kept;
      turn_begin(&kept);
      if ((flags & O_TMPFILE) != O_TMPFILE)
        voice_writing(w, w->first, flags & O_TRUNC, flags & O_CREAT, (flags & O_CREAT) && (flags & O_EXCL),
                      flags & O_APPEND);
      turn_noted(&kept);
      result = sys_openat(dirfd, path, flags, mode);
      turn_end();
    }
  }
  work_end(w);
  return result;
}

static mode_t mode_in(int flags, va_list list)
{
  return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(list, mode_t) : 0;
}

EXPORT int open(const char *path, int flags, ...)
{
  va_list list;
  va_start(list, flags);
  mode_t mode = mode_in(flags, list);
  va_end(list);
  return (int)border(do_open(AT_FDCWD, path, flags, mode));
}
SAME(open64, open);
SAME(__open, open);
SAME(__open64, open);

EXPORT int openat(int dirfd, const char *path, int flags, ...)
{
  va_list list;
  va_start(list, flags);
  mode_t mode = mode_in(flags, list);
  va_end(list);
  return (int)border(do_open(dirfd, path, flags, mode));
}
SAME(openat64, openat);

EXPORT int __open_2(const char *path, int flags) { return (int)border(do_open(AT_FDCWD, path, flags, 0)); }
extern int __open64_2(const char *path, int flags) ALIAS(__open_2);
EXPORT int __openat_2(int dirfd, const char *path, int flags) { return (int)border(do_open(dirfd, path, flags, 0)); }
extern int __openat64_2(int dirfd, const char *path, int flags) ALIAS(__openat_2);

EXPORT int creat(const char *path, mode_t mode)
{
  return (int)border(do_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode));
}
SAME(creat64, creat);

static int stream_flags(const char *mode)
{
  int flags = *mode == 'r' ? O_RDONLY : *mode == 'w' ? O_CREAT | O_TRUNC : *mode == 'a' ? O_CREAT | O_APPEND : -1;
  if (flags < 0) return -1;
  int writes = *mode != 'r', plus = 0;
  for (const char *m = mode + 1; *m && *m != ','; m++) {
    if (*m == '+') plus = 1;
    if (*m == 'x') flags |= O_EXCL;
    if (*m == 'e') flags |= O_CLOEXEC;
  }
  return flags | (plus ? O_RDWR : writes ? O_WRONLY : O_RDONLY);
}

EXPORT FILE *fopen(const char *path, const char *mode)
{
  int flags = mode ? stream_flags(mode) : -1;
  if (flags < 0 || !active()) return LIBC(fopen)(path, mode);
  int fd = do_open(AT_FDCWD, path, flags, 0666);
  if (fd < 0) {
    errno = -fd;
    return NULL;
  }
  FILE *stream = fdopen(fd, mode);
  if (!stream) {
    int why = errno;
    sys_close(fd);
    errno = why;
  }
  return stream;
}
SAME(fopen64, fopen);

EXPORT FILE *freopen(const char *path, const char *mode, FILE *stream)
{
  int flags = mode ? stream_flags(mode) : -1;
  if (!path || flags < 0 || !active()) return LIBC(freopen)(path, mode, stream);
  int fd = do_open(AT_FDCWD, path, flags, 0666);
  if (fd < 0) {
    int why = -fd;
    fclose(stream);
    errno = why;
    return NULL;
  }
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  char again[8] = {*mode == 'w' ? 'r' : *mode, 0}; /* it is there, and empty */
  if (*mode == 'w' || strchr(mode, '+')) strcat(again, "+");
  if (strchr(mode, 'e')) strcat(again, "e");
  FILE *result = LIBC(freopen)(link, again, stream);
  sys_close(fd);
  return result;
}
SAME(freopen64, freopen);

/* ---- looking ---- */

/* A folder that this rank has changed shows it by its time, as it would on one process: importers go by that. */
static int changed_here(const struct place *p)
{
  signals kept = signals_off();
  tables_look(1);
  const struct folder *f =
      p->state == LOWER || p->state == KEPT ? folder_of(strcmp(p->where, "/") ? p->where : "") : NULL;
  int result = f && f->mine > 0;
  tables_look(0);
  signals_back(kept);
  return result;
}

static const char *mirror_of(struct work *w, const struct place *p)
{
  strcpy(w->second, config.tree);
  return strcat(w->second, p->where);
}

static int real_stat(int dirfd, const char *path, struct stat *st, int flags)
{
  int result = (int)raw(SYS_newfstatat, dirfd, (long)path, (long)st, flags, 0, 0);
  if (result >= 0 && config.side == VOICE && !plain_mode) known_as(&st->st_dev, &st->st_ino);
  return result;
}

int do_stat(int dirfd, const char *path, struct stat *st, int flags)
{
  if (!active() || config.side == VOICE || !path || !*path) return real_stat(dirfd, path, st, flags);
  struct work *w = work_begin();
  struct place *p = &w->a;
  int result;
  if (absolute(dirfd, path, w->first) < 0)
    result = (int)raw(SYS_newfstatat, dirfd, (long)path, (long)st, flags, 0, 0);
  else {
    int follow = !(flags & AT_SYMLINK_NOFOLLOW);
    signals kept = signals_off(); /* once: an import makes some 18,000 of these calls */
    LOOK(result, w, p, w->first, 0, sys_stat(p->target, st, p->state == THROUGH ? flags : flags | AT_SYMLINK_NOFOLLOW));
    if (result >= 0 && follow && p->state != THROUGH && S_ISLNK(st->st_mode))
      LOOK(result, w, p, w->first, 1,
           sys_stat(p->target, st, p->state == THROUGH ? flags : flags | AT_SYMLINK_NOFOLLOW));
    struct stat mirror;
    if (result >= 0 && S_ISDIR(st->st_mode) && changed_here(p) && sys_stat(mirror_of(w, p), &mirror, 0) == 0) {
      st->st_mtim = mirror.st_mtim;
      st->st_ctim = mirror.st_ctim;
    }
    signals_back(kept);
  }
  work_end(w);
  return result;
}

static int sys_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out)
{
  return (int)raw(SYS_statx, dirfd, (long)path, flags, mask, (long)out, 0);
}

int do_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out)
{
  if (!active() || config.side == VOICE || !path || !*path) return sys_statx(dirfd, path, flags, mask, out);
  struct work *w = work_begin();
  struct place *p = &w->a;
  int result;
  if (absolute(dirfd, path, w->first) < 0)
    result = sys_statx(dirfd, path, flags, mask, out);
  else {
    LOOK(result, w, p, w->first, !(flags & AT_SYMLINK_NOFOLLOW),
         sys_statx(AT_FDCWD, p->target, p->state == THROUGH ? flags : flags | AT_SYMLINK_NOFOLLOW, mask, out));
    struct stat mirror;
    if (result >= 0 && S_ISDIR(out->stx_mode) && changed_here(p) && sys_stat(mirror_of(w, p), &mirror, 0) == 0) {
      out->stx_mtime.tv_sec = mirror.st_mtim.tv_sec;
      out->stx_mtime.tv_nsec = (uint32_t)mirror.st_mtim.tv_nsec;
      out->stx_ctime.tv_sec = mirror.st_ctim.tv_sec;
      out->stx_ctime.tv_nsec = (uint32_t)mirror.st_ctim.tv_nsec;
    }
  }
  work_end(w);
  return result;
}

EXPORT int fstat(int fd, struct stat *st)
{
  int result = (int)raw(SYS_fstat, fd, (long)st, 0, 0, 0, 0);
  if (result >= 0 && config.side == VOICE && !plain_mode) known_as(&st->st_dev, &st->st_ino);
  return (int)border(result);
}
extern int fstat64(int fd, struct stat64 *st) ALIAS(fstat);
EXPORT int __fxstat(int version, int fd, struct stat *st) { (void)version; return fstat(fd, st); }
extern int __fxstat64(int version, int fd, struct stat64 *st) ALIAS(__fxstat);

EXPORT int stat(const char *path, struct stat *st) { return (int)border(do_stat(AT_FDCWD, path, st, 0)); }
EXPORT int lstat(const char *path, struct stat *st)
{
  return (int)border(do_stat(AT_FDCWD, path, st, AT_SYMLINK_NOFOLLOW));
}
EXPORT int fstatat(int dirfd, const char *path, struct stat *st, int flags)
{
  return (int)border(do_stat(dirfd, path, st, flags));
}
extern int stat64(const char *path, struct stat64 *st) ALIAS(stat);
extern int lstat64(const char *path, struct stat64 *st) ALIAS(lstat);
extern int fstatat64(int dirfd, const char *path, struct stat64 *st, int flags) ALIAS(fstatat);
/* what programs that were built for a libc before 2.33 call */
EXPORT int __xstat(int version, const char *path, struct stat *st) { (void)version; return stat(path, st); }
EXPORT int __lxstat(int version, const char *path, struct stat *st) { (void)version; return lstat(path, st); }
EXPORT int __fxstatat(int version, int dirfd, const char *path, struct stat *st, int flags)
{
  (void)version;
  return fstatat(dirfd, path, st, flags);
}
extern int __xstat64(int version, const char *path, struct stat64 *st) ALIAS(__xstat);
extern int __lxstat64(int version, const char *path, struct stat64 *st) ALIAS(__lxstat);
extern int __fxstatat64(int version, int dirfd, const char *path, struct stat64 *st, int flags) ALIAS(__fxstatat);

EXPORT int statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out)
{
  return (int)border(do_statx(dirfd, path, flags, mask, out));
}

static long raw_access(int dirfd, const char *path, int mode, int flags)
{
  long result = raw(SYS_faccessat2, dirfd, (long)path, mode, flags, 0, 0);
  return result == -ENOSYS ? raw(SYS_faccessat, dirfd, (long)path, mode, 0, 0, 0) : result;
}

int do_access(int dirfd, const char *path, int mode, int flags)
{
  return (int)SEEN(dirfd, path, !(flags & AT_SYMLINK_NOFOLLOW), raw_access(dirfd, path, mode, flags),
                   sys_access(target, mode, flags));
}

EXPORT int access(const char *path, int mode) { return (int)border(do_access(AT_FDCWD, path, mode, 0)); }
EXPORT int faccessat(int dirfd, const char *path, int mode, int flags)
{
  return (int)border(do_access(dirfd, path, mode, flags));
}
EXPORT int euidaccess(const char *path, int mode) { return (int)border(do_access(AT_FDCWD, path, mode, AT_EACCESS)); }
SAME(eaccess, euidaccess);

long do_readlink(int dirfd, const char *path, char *text, size_t room)
{
  if (!active() || config.side == VOICE || !path || !*path)
    return raw(SYS_readlinkat, dirfd, (long)path, (long)text, (long)room, 0, 0);
  struct work *w = work_begin();
  long result;
  if (absolute(dirfd, path, w->first) < 0)
    result = raw(SYS_readlinkat, dirfd, (long)path, (long)text, (long)room, 0, 0);
  else {
    LOOK(result, w, &w->a, w->first, 0, sys_readlink(w->a.target, w->link, BIG));
    if (result >= 0) {
      if (!strncmp(w->a.where, "/proc/", 6)) script_name(w->link); /* an open file, the working folder */
      result = (long)strlen(w->link);
      if ((size_t)result > room) result = (long)room;
      memcpy(text, w->link, (size_t)result);
    }
  }
  work_end(w);
  return result;
}

EXPORT ssize_t readlink(const char *path, char *text, size_t room)
{
  return border(do_readlink(AT_FDCWD, path, text, room));
}
EXPORT ssize_t readlinkat(int dirfd, const char *path, char *text, size_t room)
{
  return border(do_readlink(dirfd, path, text, room));
}
extern void __chk_fail(void) __attribute__((noreturn));
EXPORT ssize_t __readlink_chk(const char *path, char *text, size_t room, size_t there)
{
  if (there < room) __chk_fail();
  return readlink(path, text, room);
}
EXPORT ssize_t __readlinkat_chk(int dirfd, const char *path, char *text, size_t room, size_t there)
{
  if (there < room) __chk_fail();
  return readlinkat(dirfd, path, text, room);
}
