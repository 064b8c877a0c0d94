/* A process: where it is, and what it opens by other ways than files. */
#include "files.h"
#include <linux/close_range.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/un.h>

#define ALIAS(name) __attribute__((alias(#name), visibility("default")))
#define SAME(to, from) extern __typeof__(from) to ALIAS(from)

void *libc_function(const char *name) { return dlsym(RTLD_NEXT, name); }

/* ---- the working folder ---- */

long do_getcwd(char *out, size_t room)
{
  if (!active() || config.side == VOICE) return raw(SYS_getcwd, (long)out, (long)room, 0, 0, 0, 0);
  struct work *w = work_begin();
  long result = raw(SYS_getcwd, (long)w->first, BIG, 0, 0, 0, 0);
  int gone = result == -ENOENT; /* the voice may have removed it, or this rank */
  if (gone) result = sys_readlink("/proc/self/cwd", w->first, BIG);
  if (result >= 0) {
    if (where_it_was(w->first, "/proc/self/cwd") < 0 ||
        (gone && (find(w, &w->a, w->first, 0) < 0 || w->a.state == ABSENT)))
      result = -ENOENT;
  }
  if (result >= 0) {
    result = (long)strlen(w->first) + 1;
    if ((size_t)result > room)
      result = -ERANGE;
    else
      memcpy(out, w->first, (size_t)result);
  }
  work_end(w);
  return result;
}

int do_chdir(const char *path)
{
  if (!active() || config.side == VOICE) return (int)raw(SYS_chdir, (long)path, 0, 0, 0, 0, 0);
  struct work *w = work_begin();
  int result;
  if (absolute(AT_FDCWD, path, w->first) < 0)
    result = (int)raw(SYS_chdir, (long)path, 0, 0, 0, 0, 0);
  else
    LOOK(result, w, &w->a, w->first, 1, ({
           int fd = sys_open(w->a.target, O_PATH | O_DIRECTORY | O_CLOEXEC, 0), done = fd;
           if (fd >= 0) {
             done = (int)raw(SYS_fchdir, fd, 0, 0, 0, 0, 0);
             sys_close(fd);
           }
           done;
         }));
  work_end(w);
  return result;
}

EXPORT int chdir(const char *path) { return (int)border(do_chdir(path)); }

EXPORT char *getcwd(char *out, size_t room)
{
  if (!active() || config.side == VOICE) return LIBC(getcwd)(out, room);
  char *mine = out;
  if (!out) {
    if (!room) room = BIG;
    mine = malloc(room);
    if (!mine) return NULL;
  } else if (!room) {
    errno = EINVAL;
    return NULL;
  }
  long result = do_getcwd(mine, room);
  if (result < 0) {
    if (!out) free(mine);
    errno = (int)-result;
    return NULL;
  }
  return out ? out : realloc(mine, (size_t)result);
}
EXPORT char *get_current_dir_name(void) { return active() ? getcwd(NULL, 0) : LIBC(get_current_dir_name)(); }
extern void __chk_fail(void) __attribute__((noreturn));
EXPORT char *__getcwd_chk(char *out, size_t room, size_t there)
{
  if (there < room) __chk_fail();
  return getcwd(out, room);
}

/* ---- names ---- */

/* The real path that stands for ``path`` for somebody who only reads; NULL: ``path`` itself will do. */
const char *stands_for(struct work *w, int dirfd, const char *path)
{
  if (!active() || config.side == VOICE || absolute(dirfd, path, w->first) < 0) return NULL;
  int result;
  struct stat st;
  LOOK(result, w, &w->a, w->first, 1, sys_stat(w->a.target, &st, 0));
  if (result < 0 && result != -ENOENT) return NULL;
  if (result == -ENOENT) { /* at the path itself there may be something of the voice's by now */
    int found = find(w, &w->a, w->first, 1);
    if (found >= 0 && (w->a.state == LOWER || w->a.state == THROUGH)) return NULL;
    strcpy(w->a.target, config.root);
    return strcat(w->a.target, "/absent");
  }
  return w->a.state == LOWER || w->a.state == THROUGH ? NULL : w->a.target;
}

EXPORT char *realpath(const char *path, char *out)
{
  if (!active() || config.side == VOICE || !path || !*path) return LIBC(realpath)(path, out);
  struct work *w = work_begin();
  char *result = NULL;
  if (absolute(AT_FDCWD, path, w->first) < 0)
    result = LIBC(realpath)(path, out);
  else {
    struct stat st;
    int there;
    LOOK(there, w, &w->a, w->first, 1, sys_stat(w->a.target, &st, 0));
    if (there < 0)
      errno = -there;
    else if (w->a.state == THROUGH)
      result = LIBC(realpath)(w->a.where, out);
    else {
      size_t n = strlen(w->a.where);
      if (n >= PATH_MAX)
        errno = ENAMETOOLONG;
      else if ((result = out ? out : malloc(n + 1)))
        memcpy(result, w->a.where, n + 1);
    }
  }
  work_end(w);
  return result;
}
EXPORT char *canonicalize_file_name(const char *path) { return realpath(path, NULL); }
EXPORT char *__realpath_chk(const char *path, char *out, size_t there)
{
  if (there < PATH_MAX) __chk_fail();
  return realpath(path, out);
}

EXPORT int statfs(const char *path, struct statfs *out) { return STANDING(int, path, LIBC(statfs)(for_it, out)); }
EXPORT int statvfs(const char *path, struct statvfs *out) { return STANDING(int, path, LIBC(statvfs)(for_it, out)); }
extern int statfs64(const char *path, struct statfs64 *out) ALIAS(statfs);
extern int statvfs64(const char *path, struct statvfs64 *out) ALIAS(statvfs);
EXPORT long pathconf(const char *path, int name) { return STANDING(long, path, LIBC(pathconf)(for_it, name)); }
EXPORT int inotify_add_watch(int fd, const char *path, uint32_t mask)
{
  return STANDING(int, path, LIBC(inotify_add_watch)(fd, for_it, mask));
}

/* A library may be one that the script has built. Names without a folder are left to libc, which searches for them as
 * the caller asks: a tail call. */
EXPORT void *dlopen(const char *path, int flags)
{
  if (!path || !active() || !strchr(path, '/') || strchr(path, '$')) return LIBC(dlopen)(path, flags);
  struct stat st; /* where there is really nothing, the path itself: an error names it */
  void *result = STANDING(void *, path, ({
    int nothing = sys_stat(for_it, &st, 0) < 0 && sys_stat(path, &st, 0) < 0;
    LIBC(dlopen)(nothing ? path : for_it, flags);
  }));
  trap_look();
  return result;
}

/* ---- sockets that have a path ---- */

static socklen_t short_address(struct sockaddr_un *to, const char *place, int *folder)
{
  size_t n = strlen(place);
  to->sun_family = AF_UNIX;
  *folder = -1;
  if (n < sizeof to->sun_path) {
    memcpy(to->sun_path, place, n + 1);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n + 1);
  }
  const char *slash = strrchr(place, '/'); /* by way of its open folder */
  char *above = strndupa(place, (size_t)(slash - place));
  *folder = sys_open(above, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
  int length = snprintf(to->sun_path, sizeof to->sun_path, "/proc/self/fd/%d%s", *folder, slash);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)length + 1);
}

static const char *socket_path(const struct sockaddr *address, socklen_t length, char *out)
{
  if (!active() || !address || length <= offsetof(struct sockaddr_un, sun_path) || address->sa_family != AF_UNIX)
    return NULL;
  const struct sockaddr_un *un = (const struct sockaddr_un *)address;
  size_t room = length - offsetof(struct sockaddr_un, sun_path);
  if (!un->sun_path[0] || room > sizeof un->sun_path) return NULL;
  memcpy(out, un->sun_path, room);
  out[room] = 0;
  return out;
}

EXPORT int connect(int fd, const struct sockaddr *address, socklen_t length)
{
  char path[sizeof(struct sockaddr_un) + 1];
  if (config.side == VOICE || !socket_path(address, length, path)) return LIBC(connect)(fd, address, length);
  struct work *w = work_begin();
  const char *other = stands_for(w, AT_FDCWD, path);
  int result;
  if (other) {
    struct sockaddr_un to;
    int folder;
    socklen_t n = short_address(&to, other, &folder);
    result = LIBC(connect)(fd, (struct sockaddr *)&to, n);
    if (folder >= 0) sys_close(folder);
  } else
    result = LIBC(connect)(fd, address, length);
  work_end(w);
  return result;
}

/* By what name the script knows a socket, which the kernel knows by its place in the mirror. */
static struct { ino_t inode; char path[sizeof ((struct sockaddr_un *)0)->sun_path + 1]; } bound[128];
static unsigned bound_count;

EXPORT int getsockname(int fd, struct sockaddr *address, socklen_t *length)
{
  socklen_t room = length ? *length : 0;
  int result = LIBC(getsockname)(fd, address, length);
  struct stat st;
  if (result < 0 || config.side == OFF || address->sa_family != AF_UNIX) return result;
  if (raw(SYS_fstat, fd, (long)&st, 0, 0, 0, 0) < 0) return result;
  for (unsigned i = 0; i < 128 && i < bound_count; i++)
    if (bound[i].inode == st.st_ino) {
      struct sockaddr_un name = {.sun_family = AF_UNIX};
      strcpy(name.sun_path, bound[i].path);
      *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name.sun_path) + 1);
      memcpy(address, &name, room < *length ? room : *length);
    }
  return result;
}

EXPORT int bind(int fd, const struct sockaddr *address, socklen_t length)
{
  char path[sizeof(struct sockaddr_un) + 1];
  if (!socket_path(address, length, path)) return LIBC(bind)(fd, address, length);
  /* a file stands in for the socket until its place is known: names, permissions and logs are those of a file */
  int made = do_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made < 0) {
    errno = made == -EEXIST ? EADDRINUSE : -made;
    return -1;
  }
  struct work *w = work_begin();
  char *place = w->first;
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", made);
  sys_readlink(link, place, BIG);
  sys_close(made);
  sys_unlink(place, 0);
  struct sockaddr_un to;
  int folder = -1, result;
  if (config.side == VOICE)
    result = LIBC(bind)(fd, address, length);
  else {
    socklen_t n = short_address(&to, place, &folder);
    result = LIBC(bind)(fd, (struct sockaddr *)&to, n);
  }
  struct stat st;
  if (result == 0 && raw(SYS_fstat, fd, (long)&st, 0, 0, 0, 0) == 0) {
    unsigned slot = __sync_fetch_and_add(&bound_count, 1) % 128;
    bound[slot].inode = st.st_ino;
    strcpy(bound[slot].path, path);
  }
  if (folder >= 0) sys_close(folder);
  work_end(w);
  return result;
}

/* ---- descriptors ---- */

/* A file that this rank only reads is the same file on every rank, and a lock on it would keep ranks from each other:
 * in this rank's view nobody else has it. Those in the mirror, and those that are the same for all, are locked. */
long do_flock(int fd, int how)
{
  if (active() && config.side == OWN) {
    struct work *w = work_begin();
    char link[40], *path = w->first;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int only_read = sys_readlink(link, path, BIG) > 0 && *path == '/' && strncmp(path, "/memfd:", 7) &&
                    strncmp(path, config.tree, config.tree_length) &&
                    (!is_through(path) || !strncmp(path, config.kept, config.kept_length));
    work_end(w);
    if (only_read) return 0;
  }
  return raw(SYS_flock, fd, how, 0, 0, 0, 0);
}
EXPORT int flock(int fd, int how) { return (int)border(do_flock(fd, how)); }

EXPORT int close(int fd)
{
  if (descriptor_is_ours(fd)) return 0;
  return LIBC(close)(fd);
}

long do_close_range(unsigned first, unsigned last, unsigned flags)
{
  if (config.side == OFF || flags & CLOSE_RANGE_CLOEXEC) return raw(SYS_close_range, first, last, flags, 0, 0, 0);
  for (unsigned fd = first; fd <= last && fd < 65536; fd++) /* around ours */
    if (descriptor_is_ours((int)fd)) {
      if (fd > first) {
        long result = raw(SYS_close_range, first, fd - 1, flags, 0, 0, 0);
        if (result < 0) return result;
      }
      first = fd + 1;
    }
  return first > last ? 0 : raw(SYS_close_range, first, last, flags, 0, 0, 0);
}
EXPORT int close_range(unsigned first, unsigned last, int flags)
{
  return (int)border(do_close_range(first, last, (unsigned)flags));
}
EXPORT void closefrom(int first)
{
  if (do_close_range(first < 0 ? 0 : (unsigned)first, ~0u, 0) < 0) LIBC(closefrom)(first);
}
EXPORT int dup2(int from, int to)
{
  if (from != to && descriptor_is_ours(to)) descriptor_moves(to);
  return LIBC(dup2)(from, to);
}
EXPORT int dup3(int from, int to, int flags)
{
  if (from != to && descriptor_is_ours(to)) descriptor_moves(to);
  return LIBC(dup3)(from, to, flags);
}
