/* libc's functions that make, move and remove names, and that change what a file is without opening it. */
#include "files.h"
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <utime.h>

#define ALIAS(name) __attribute__((alias(#name), visibility("default")))
#define SAME(to, from) extern __typeof__(from) to ALIAS(from)

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

int do_rename(int from_at, const char *from, int to_at, const char *to, unsigned flags)
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

int do_link(int from_at, const char *from, int to_at, const char *to, int flags)
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

int do_symlink(const char *text, int dirfd, const char *path)
{
  return (int)CHANGED(dirfd, path, own_symlink(w, text, w->first), voice_making(w, w->first),
                      raw(SYS_symlinkat, (long)text, dirfd, (long)path, 0, 0, 0));
}

EXPORT int symlink(const char *text, const char *path) { return (int)border(do_symlink(text, AT_FDCWD, path)); }
EXPORT int symlinkat(const char *text, int dirfd, const char *path)
{
  return (int)border(do_symlink(text, dirfd, path));
}

int do_node(int dirfd, const char *path, mode_t mode, dev_t device)
{
  return (int)CHANGED(dirfd, path, own_node(w, w->first, mode, device), voice_making(w, w->first),
                      raw(SYS_mknodat, dirfd, (long)path, mode, (long)device, 0, 0));
}

EXPORT int mknod(const char *path, mode_t mode, dev_t device)
{
  return (int)border(do_node(AT_FDCWD, path, mode, device));
}
EXPORT int mknodat(int dirfd, const char *path, mode_t mode, dev_t device)
{
  return (int)border(do_node(dirfd, path, mode, device));
}
EXPORT int mkfifo(const char *path, mode_t mode) { return (int)border(do_node(AT_FDCWD, path, mode | S_IFIFO, 0)); }
EXPORT int mkfifoat(int dirfd, const char *path, mode_t mode)
{
  return (int)border(do_node(dirfd, path, mode | S_IFIFO, 0));
}
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

long do_truncate(const char *path, off_t length)
{
  return ADJUSTED(AT_FDCWD, path, 1, 1, raw(SYS_truncate, (long)path, length, 0, 0, 0, 0), cut_to(target, length));
}
EXPORT int truncate(const char *path, off_t length) { return (int)border(do_truncate(path, length)); }
SAME(truncate64, truncate);

long do_chmod(int dirfd, const char *path, mode_t mode)
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

long do_chown(int dirfd, const char *path, uid_t uid, gid_t gid, int flags)
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

long do_times(int dirfd, const char *path, const struct timespec *times, int flags)
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
  (ssize_t)border(SEEN(AT_FDCWD, path, follow, raw(number, (long)path, __VA_ARGS__),                                  \
                      raw(number, (long)target, __VA_ARGS__)))
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
  (int)border(ADJUSTED(AT_FDCWD, path, follow, 0, raw(number, (long)path, __VA_ARGS__),                               \
                      raw(number, (long)target, __VA_ARGS__)))
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
