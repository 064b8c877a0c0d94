/* libc's functions that name a file, as programs call them; folders are in dirs.c, programs in process.c. */
#include "files.h"
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <utime.h>

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
  const struct folder *f = p->state == LOWER || p->state == KEPT ? folder_of(strcmp(p->where, "/") ? p->where : "") : NULL;
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
    LOOK(result, w, p, w->first, 0, sys_stat(p->target, st, p->state == THROUGH ? flags : flags | AT_SYMLINK_NOFOLLOW));
    if (result >= 0 && follow && p->state != THROUGH && S_ISLNK(st->st_mode))
      LOOK(result, w, p, w->first, 1, sys_stat(p->target, st, p->state == THROUGH ? flags : flags | AT_SYMLINK_NOFOLLOW));
    struct stat mirror;
    if (result >= 0 && S_ISDIR(st->st_mode) && changed_here(p) && sys_stat(mirror_of(w, p), &mirror, 0) == 0) {
      st->st_mtim = mirror.st_mtim;
      st->st_ctim = mirror.st_ctim;
    }
  }
  work_end(w);
  return result;
}

static int sys_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out)
{
  return (int)raw(SYS_statx, dirfd, (long)path, flags, mask, (long)out, 0);
}

static int do_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out)
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

/* ``act`` on what ``path`` stands for, on every side but the own rank's: ``plain``. */
#define SEEN(dirfd, path, follow, plain, act)                                             \
  ({                                                                                      \
    long result_;                                                                         \
    if (!active() || config.side == VOICE)                                                \
      result_ = (plain);                                                                  \
    else {                                                                                \
      struct work *w = work_begin();                                                      \
      if (absolute(dirfd, path, w->first) < 0)                                            \
        result_ = (plain);                                                                \
      else {                                                                              \
        const char *target = w->a.target;                                                 \
        LOOK(result_, w, &w->a, w->first, follow, (act));                                 \
      }                                                                                   \
      work_end(w);                                                                        \
    }                                                                                     \
    result_;                                                                              \
  })

static long raw_access(int dirfd, const char *path, int mode, int flags)
{
  long result = raw(SYS_faccessat2, dirfd, (long)path, mode, flags, 0, 0);
  return result == -ENOSYS ? raw(SYS_faccessat, dirfd, (long)path, mode, 0, 0, 0) : result;
}

static int do_access(int dirfd, const char *path, int mode, int flags)
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

static long do_readlink(int dirfd, const char *path, char *text, size_t room)
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

/* ---- names that come and go ---- */

/* On the voice first ``note``, then the call as it is; elsewhere ``own``. */
#define CHANGED(dirfd, path, own, note, plain)      \
  ({                                                \
    long result_ = NOW_VOICE;                       \
    if (!active())                                  \
      result_ = (plain);                            \
    else {                                          \
      struct work *w = work_begin();                \
      if (absolute(dirfd, path, w->first) < 0)      \
        result_ = (plain);                          \
      else {                                        \
        if (config.side == OWN) result_ = (own);    \
        if (result_ == NOW_VOICE) {                 \
          signals kept_;                            \
          turn_begin(&kept_);                       \
          note;                                     \
          turn_noted(&kept_);                       \
          result_ = (plain);                        \
          turn_end();                               \
        }                                           \
      }                                             \
      work_end(w);                                  \
    }                                               \
    result_;                                        \
  })

int do_mkdir(int dirfd, const char *path, mode_t mode)
{
  return (int)CHANGED(dirfd, path, own_mkdir(w, w->first, mode), voice_making(w, w->first),
                      raw(SYS_mkdirat, dirfd, (long)path, mode, 0, 0, 0));
}

int do_remove(int dirfd, const char *path, int flags)
{
  return (int)CHANGED(dirfd, path, own_remove(w, w->first, (flags & AT_REMOVEDIR) != 0), voice_removing(w, w->first),
                      raw(SYS_unlinkat, dirfd, (long)path, flags, 0, 0, 0));
}

EXPORT int mkdir(const char *path, mode_t mode) { return (int)border(do_mkdir(AT_FDCWD, path, mode)); }
EXPORT int mkdirat(int dirfd, const char *path, mode_t mode) { return (int)border(do_mkdir(dirfd, path, mode)); }
EXPORT int unlink(const char *path) { return (int)border(do_remove(AT_FDCWD, path, 0)); }
EXPORT int rmdir(const char *path) { return (int)border(do_remove(AT_FDCWD, path, AT_REMOVEDIR)); }
EXPORT int unlinkat(int dirfd, const char *path, int flags) { return (int)border(do_remove(dirfd, path, flags)); }
EXPORT int remove(const char *path)
{
  int result = do_remove(AT_FDCWD, path, 0);
  if (result == -EISDIR || result == -EPERM) result = do_remove(AT_FDCWD, path, AT_REMOVEDIR);
  return (int)border(result);
}

static long raw_rename(int from_at, const char *from, int to_at, const char *to, unsigned flags)
{
#ifdef SYS_renameat
  if (!flags) return raw(SYS_renameat, from_at, (long)from, to_at, (long)to, 0, 0);
#endif
  return raw(SYS_renameat2, from_at, (long)from, to_at, (long)to, flags, 0);
}

static int do_rename(int from_at, const char *from, int to_at, const char *to, unsigned flags)
{
  return (int)CHANGED(from_at, from,
                      absolute(to_at, to, w->second) < 0 ? (to && *to ? -ENAMETOOLONG : -ENOENT)
                                                         : own_rename(w, w->first, w->second, flags),
                      if (absolute(to_at, to, w->second) >= 0) voice_renaming(w, w->first, w->second),
                      raw_rename(from_at, from, to_at, to, flags));
}

EXPORT int rename(const char *from, const char *to)
{
  return (int)border(do_rename(AT_FDCWD, from, AT_FDCWD, to, 0));
}
EXPORT int renameat(int from_at, const char *from, int to_at, const char *to)
{
  return (int)border(do_rename(from_at, from, to_at, to, 0));
}
EXPORT int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags)
{
  return (int)border(do_rename(from_at, from, to_at, to, flags));
}

static int do_link(int from_at, const char *from, int to_at, const char *to, int flags)
{
  if (from && !*from) /* a file without a name, by its descriptor */
    return (int)raw(SYS_linkat, from_at, (long)from, to_at, (long)to, flags, 0);
  return (int)CHANGED(from_at, from,
                      absolute(to_at, to, w->second) < 0 ? -ENOENT
                                                         : own_link(w, w->first, w->second, flags & AT_SYMLINK_FOLLOW),
                      if (absolute(to_at, to, w->second) >= 0) voice_making(w, w->second),
                      raw(SYS_linkat, from_at, (long)from, to_at, (long)to, flags, 0));
}

EXPORT int link(const char *from, const char *to) { return (int)border(do_link(AT_FDCWD, from, AT_FDCWD, to, 0)); }
EXPORT int linkat(int from_at, const char *from, int to_at, const char *to, int flags)
{
  return (int)border(do_link(from_at, from, to_at, to, flags));
}

static int do_symlink(const char *text, int dirfd, const char *path)
{
  return (int)CHANGED(dirfd, path, own_symlink(w, text, w->first), voice_making(w, w->first),
                      raw(SYS_symlinkat, (long)text, dirfd, (long)path, 0, 0, 0));
}

EXPORT int symlink(const char *text, const char *path) { return (int)border(do_symlink(text, AT_FDCWD, path)); }
EXPORT int symlinkat(const char *text, int dirfd, const char *path) { return (int)border(do_symlink(text, dirfd, path)); }

static int do_node(int dirfd, const char *path, mode_t mode, dev_t device)
{
  return (int)CHANGED(dirfd, path, own_node(w, w->first, mode, device), voice_making(w, w->first),
                      raw(SYS_mknodat, dirfd, (long)path, mode, (long)device, 0, 0));
}

EXPORT int mknod(const char *path, mode_t mode, dev_t device) { return (int)border(do_node(AT_FDCWD, path, mode, device)); }
EXPORT int mknodat(int dirfd, const char *path, mode_t mode, dev_t device)
{
  return (int)border(do_node(dirfd, path, mode, device));
}
EXPORT int mkfifo(const char *path, mode_t mode) { return (int)border(do_node(AT_FDCWD, path, mode | S_IFIFO, 0)); }
EXPORT int mkfifoat(int dirfd, const char *path, mode_t mode) { return (int)border(do_node(dirfd, path, mode | S_IFIFO, 0)); }
EXPORT int __xmknod(int version, const char *path, mode_t mode, dev_t *device)
{
  (void)version;
  return mknod(path, mode, *device);
}
EXPORT int __xmknodat(int version, int dirfd, const char *path, mode_t mode, dev_t *device)
{
  (void)version;
  return mknodat(dirfd, path, mode, *device);
}

/* ---- contents, mode, owner, times ---- */

/* ``act`` on a file of this rank's own, copied up if need be. The voice keeps contents, not modes and times. */
#define ADJUSTED(dirfd, path, follow, write, plain, act)                   \
  ({                                                                       \
    long result_ = NOW_VOICE;                                              \
    if (!active() || (config.side == VOICE && !(write)))                   \
      result_ = (plain);                                                   \
    else {                                                                 \
      struct work *w = work_begin();                                       \
      if (absolute(dirfd, path, w->first) < 0)                             \
        result_ = (plain);                                                 \
      else {                                                               \
        if (config.side == OWN) {                                          \
          signals kept_;                                                   \
          if (gate_enter(&kept_)) {                                        \
            const char *target = w->a.target;                              \
            result_ = own_ready(w, w->first, follow, write);               \
            if (result_ >= 0) result_ = (act);                             \
          }                                                                \
          gate_leave(&kept_);                                              \
        }                                                                  \
        if (result_ == NOW_VOICE) {                                        \
          signals kept_;                                                   \
          turn_begin(&kept_);                                              \
          if (write) voice_writing(w, w->first, 0, 0, 0, 0);                  \
          turn_noted(&kept_);                                              \
          result_ = (plain);                                               \
          turn_end();                                                      \
        }                                                                  \
      }                                                                    \
      work_end(w);                                                         \
    }                                                                      \
    result_;                                                               \
  })

static long cut_to(const char *place, off_t length)
{
  int fd = sys_open(place, O_WRONLY | O_CLOEXEC, 0);
  if (fd < 0) return fd;
  long result = raw(SYS_ftruncate, fd, length, 0, 0, 0, 0);
  sys_close(fd);
  return result;
}

static long do_truncate(const char *path, off_t length)
{
  return ADJUSTED(AT_FDCWD, path, 1, 1, raw(SYS_truncate, (long)path, length, 0, 0, 0, 0), cut_to(target, length));
}
EXPORT int truncate(const char *path, off_t length) { return (int)border(do_truncate(path, length)); }
SAME(truncate64, truncate);

static long do_chmod(int dirfd, const char *path, mode_t mode)
{
  return ADJUSTED(dirfd, path, 1, 0, raw(SYS_fchmodat, dirfd, (long)path, mode, 0, 0, 0), sys_chmod(target, mode));
}
EXPORT int chmod(const char *path, mode_t mode) { return (int)border(do_chmod(AT_FDCWD, path, mode)); }
EXPORT int fchmodat(int dirfd, const char *path, mode_t mode, int flags)
{
  if (flags) { /* of a link itself: libc says what is possible */
    struct stat st;
    int there = do_stat(dirfd, path, &st, AT_SYMLINK_NOFOLLOW);
    if (there < 0) return (int)border(there);
    if (flags & ~AT_SYMLINK_NOFOLLOW) return (int)border(-EINVAL);
    if (S_ISLNK(st.st_mode)) return (int)border(-EOPNOTSUPP);
  }
  return (int)border(do_chmod(dirfd, path, mode));
}

static long do_chown(int dirfd, const char *path, uid_t uid, gid_t gid, int flags)
{
  if (path && !*path) return raw(SYS_fchownat, dirfd, (long)path, uid, gid, flags, 0);
  return ADJUSTED(dirfd, path, !(flags & AT_SYMLINK_NOFOLLOW), 0,
                  raw(SYS_fchownat, dirfd, (long)path, uid, gid, flags, 0),
                  sys_chown(target, uid, gid, flags | (w->a.state == THROUGH ? 0 : AT_SYMLINK_NOFOLLOW)));
}
EXPORT int chown(const char *path, uid_t uid, gid_t gid) { return (int)border(do_chown(AT_FDCWD, path, uid, gid, 0)); }
EXPORT int lchown(const char *path, uid_t uid, gid_t gid)
{
  return (int)border(do_chown(AT_FDCWD, path, uid, gid, AT_SYMLINK_NOFOLLOW));
}
EXPORT int fchownat(int dirfd, const char *path, uid_t uid, gid_t gid, int flags)
{
  return (int)border(do_chown(dirfd, path, uid, gid, flags));
}

static long do_times(int dirfd, const char *path, const struct timespec *times, int flags)
{
  if (!path || !*path) return raw(SYS_utimensat, dirfd, (long)path, (long)times, flags, 0, 0);
  return ADJUSTED(dirfd, path, !(flags & AT_SYMLINK_NOFOLLOW), 0,
                  raw(SYS_utimensat, dirfd, (long)path, (long)times, flags, 0, 0),
                  sys_times(target, times, flags | (w->a.state == THROUGH ? 0 : AT_SYMLINK_NOFOLLOW)));
}
EXPORT int utimensat(int dirfd, const char *path, const struct timespec times[2], int flags)
{
  return (int)border(do_times(dirfd, path, times, flags));
}
static int of_microseconds(int dirfd, const char *path, const struct timeval *times, int flags)
{
  struct timespec exact[2];
  for (int i = 0; times && i < 2; i++) {
    if (times[i].tv_usec < 0 || times[i].tv_usec > 999999) return (int)border(-EINVAL);
    exact[i].tv_sec = times[i].tv_sec;
    exact[i].tv_nsec = times[i].tv_usec * 1000;
  }
  return (int)border(do_times(dirfd, path, times ? exact : NULL, flags));
}
EXPORT int utimes(const char *path, const struct timeval times[2]) { return of_microseconds(AT_FDCWD, path, times, 0); }
EXPORT int lutimes(const char *path, const struct timeval times[2])
{
  return of_microseconds(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}
EXPORT int futimesat(int dirfd, const char *path, const struct timeval times[2])
{
  return of_microseconds(dirfd, path, times, 0);
}
EXPORT int utime(const char *path, const struct utimbuf *times)
{
  struct timespec exact[2] = {{times ? times->actime : 0, 0}, {times ? times->modtime : 0, 0}};
  return (int)border(do_times(AT_FDCWD, path, times ? exact : NULL, 0));
}

#define XATTR_READ(name, number, follow, ...)                                                             \
  (ssize_t)border(SEEN(AT_FDCWD, path, follow, raw(number, (long)path, __VA_ARGS__), raw(number, (long)target, __VA_ARGS__)))
EXPORT ssize_t getxattr(const char *path, const char *name, void *value, size_t size)
{
  return XATTR_READ(getxattr, SYS_getxattr, 1, (long)name, (long)value, (long)size, 0, 0);
}
EXPORT ssize_t lgetxattr(const char *path, const char *name, void *value, size_t size)
{
  return XATTR_READ(lgetxattr, SYS_lgetxattr, 0, (long)name, (long)value, (long)size, 0, 0);
}
EXPORT ssize_t listxattr(const char *path, char *list, size_t size)
{
  return XATTR_READ(listxattr, SYS_listxattr, 1, (long)list, (long)size, 0, 0, 0);
}
EXPORT ssize_t llistxattr(const char *path, char *list, size_t size)
{
  return XATTR_READ(llistxattr, SYS_llistxattr, 0, (long)list, (long)size, 0, 0, 0);
}
#define XATTR_CHANGE(number, follow, ...)                                                                       \
  (int)border(ADJUSTED(AT_FDCWD, path, follow, 0, raw(number, (long)path, __VA_ARGS__), raw(number, (long)target, __VA_ARGS__)))
EXPORT int setxattr(const char *path, const char *name, const void *value, size_t size, int flags)
{
  return XATTR_CHANGE(SYS_setxattr, 1, (long)name, (long)value, (long)size, flags, 0);
}
EXPORT int lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags)
{
  return XATTR_CHANGE(SYS_lsetxattr, 0, (long)name, (long)value, (long)size, flags, 0);
}
EXPORT int removexattr(const char *path, const char *name)
{
  return XATTR_CHANGE(SYS_removexattr, 1, (long)name, 0, 0, 0, 0);
}
EXPORT int lremovexattr(const char *path, const char *name)
{
  return XATTR_CHANGE(SYS_lremovexattr, 0, (long)name, 0, 0, 0, 0);
}

/* ---- syscall(): programs and libraries that skip libc's functions, but not libc (safetensors renames so) ---- */

long do_call(long number, long a, long b, long c, long d, long e, long f)
{
  switch (number) {
#ifdef SYS_open
  case SYS_open: return do_open(AT_FDCWD, (const char *)a, (int)b, (mode_t)c);
  case SYS_creat: return do_open(AT_FDCWD, (const char *)a, O_WRONLY | O_CREAT | O_TRUNC, (mode_t)b);
  case SYS_stat: return do_stat(AT_FDCWD, (const char *)a, (struct stat *)b, 0);
  case SYS_lstat: return do_stat(AT_FDCWD, (const char *)a, (struct stat *)b, AT_SYMLINK_NOFOLLOW);
  case SYS_access: return do_access(AT_FDCWD, (const char *)a, (int)b, 0);
  case SYS_mkdir: return do_mkdir(AT_FDCWD, (const char *)a, (mode_t)b);
  case SYS_rmdir: return do_remove(AT_FDCWD, (const char *)a, AT_REMOVEDIR);
  case SYS_unlink: return do_remove(AT_FDCWD, (const char *)a, 0);
  case SYS_rename: return do_rename(AT_FDCWD, (const char *)a, AT_FDCWD, (const char *)b, 0);
  case SYS_link: return do_link(AT_FDCWD, (const char *)a, AT_FDCWD, (const char *)b, 0);
  case SYS_symlink: return do_symlink((const char *)a, AT_FDCWD, (const char *)b);
  case SYS_readlink: return do_readlink(AT_FDCWD, (const char *)a, (char *)b, (size_t)c);
  case SYS_chmod: return do_chmod(AT_FDCWD, (const char *)a, (mode_t)b);
  case SYS_chown: return do_chown(AT_FDCWD, (const char *)a, (uid_t)b, (gid_t)c, 0);
  case SYS_lchown: return do_chown(AT_FDCWD, (const char *)a, (uid_t)b, (gid_t)c, AT_SYMLINK_NOFOLLOW);
  case SYS_mknod: return do_node(AT_FDCWD, (const char *)a, (mode_t)b, (dev_t)c);
  case SYS_dup2: descriptor_moves((int)b); break;
#endif
#ifdef SYS_renameat
  case SYS_renameat: return do_rename((int)a, (const char *)b, (int)c, (const char *)d, 0);
#endif
  case SYS_openat: return do_open((int)a, (const char *)b, (int)c, (mode_t)d);
  case SYS_newfstatat: return do_stat((int)a, (const char *)b, (struct stat *)c, (int)d);
  case SYS_statx: return do_statx((int)a, (const char *)b, (int)c, (unsigned)d, (struct statx *)e);
  case SYS_faccessat: return do_access((int)a, (const char *)b, (int)c, 0);
  case SYS_faccessat2: return do_access((int)a, (const char *)b, (int)c, (int)d);
  case SYS_mkdirat: return do_mkdir((int)a, (const char *)b, (mode_t)c);
  case SYS_unlinkat: return do_remove((int)a, (const char *)b, (int)c);
  case SYS_renameat2: return do_rename((int)a, (const char *)b, (int)c, (const char *)d, (unsigned)e);
  case SYS_linkat: return do_link((int)a, (const char *)b, (int)c, (const char *)d, (int)e);
  case SYS_symlinkat: return do_symlink((const char *)a, (int)b, (const char *)c);
  case SYS_readlinkat: return do_readlink((int)a, (const char *)b, (char *)c, (size_t)d);
  case SYS_fchmodat: return do_chmod((int)a, (const char *)b, (mode_t)c);
  case SYS_fchownat: return do_chown((int)a, (const char *)b, (uid_t)c, (gid_t)d, (int)e);
  case SYS_utimensat: return do_times((int)a, (const char *)b, (const struct timespec *)c, (int)d);
  case SYS_mknodat: return do_node((int)a, (const char *)b, (mode_t)c, (dev_t)d);
  case SYS_truncate: return do_truncate((const char *)a, (off_t)b);
  case SYS_chdir: return do_chdir((const char *)a);
  case SYS_getcwd: return do_getcwd((char *)a, (size_t)b);
  case SYS_execve: return do_execve(AT_FDCWD, (const char *)a, (char *const *)b, (char *const *)c, 0);
  case SYS_execveat: return do_execve((int)a, (const char *)b, (char *const *)c, (char *const *)d, (int)e);
  case SYS_close:
    if (descriptor_is_ours((int)a)) return 0;
    break;
  case SYS_dup3: descriptor_moves((int)b); break;
  case SYS_close_range: return do_close_range((unsigned)a, (unsigned)b, (unsigned)c);
  }
  return raw(number, a, b, c, d, e, f);
}

EXPORT long oars_syscall(long number, long a, long b, long c, long d, long e, long f) __asm__("syscall");
EXPORT long oars_syscall(long number, long a, long b, long c, long d, long e, long f)
{
  return border(do_call(number, a, b, c, d, e, f));
}
