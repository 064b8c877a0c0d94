/* Programs and processes: where they are, what they start, and what they open by other ways than files. */
#include "files.h"
#include <alloca.h>
#include <dlfcn.h>
#include <linux/close_range.h>
#include <spawn.h>
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
  if (result >= 0) {
    script_name(w->first);
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
static const char *stands_for(struct work *w, int dirfd, const char *path)
{
  if (!active() || config.side == VOICE || absolute(dirfd, path, w->first) < 0) return NULL;
  int result;
  struct stat st;
  LOOK(result, w, &w->a, w->first, 1, sys_stat(w->a.target, &st, 0));
  if (result < 0 && result != -ENOENT) return NULL;
  if (result == -ENOENT) {
    if (find(w, &w->a, w->first, 1) < 0 || w->a.state != ABSENT) return NULL;
    strcpy(w->a.target, config.root);
    return strcat(w->a.target, "/absent");
  }
  return w->a.state == LOWER || w->a.state == THROUGH ? NULL : w->a.target;
}

/* ``call`` with ``path`` replaced by what stands for it. */
#define STANDING(type, path, call)                             \
  ({                                                           \
    struct work *w_ = work_begin();                            \
    const char *for_it = stands_for(w_, AT_FDCWD, path);       \
    if (!for_it) for_it = path;                                \
    type result_ = (call);                                     \
    work_end(w_);                                              \
    result_;                                                   \
  })

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

/* A library may be one that the script has built. Names without a folder are left to libc, which searches for them as the
 * caller asks: a tail call. */
EXPORT void *dlopen(const char *path, int flags)
{
  if (!path || !active() || !strchr(path, '/') || strchr(path, '$')) return LIBC(dlopen)(path, flags);
  void *result = STANDING(void *, path, LIBC(dlopen)(for_it, flags));
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
  if (!active() || config.side == VOICE || !address || length <= offsetof(struct sockaddr_un, sun_path) ||
      address->sa_family != AF_UNIX)
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
  if (!socket_path(address, length, path)) return LIBC(connect)(fd, address, length);
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
  if (result < 0 || config.side != OWN || address->sa_family != AF_UNIX || raw(SYS_fstat, fd, (long)&st, 0, 0, 0, 0) < 0)
    return result;
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
  int folder;
  socklen_t n = short_address(&to, place, &folder);
  int result = LIBC(bind)(fd, (struct sockaddr *)&to, n);
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

/* ---- programs ---- */

static int names(const char *line, const char *variable)
{
  size_t n = strlen(variable);
  return !strncmp(line, variable, n) && line[n] == '=';
}

#define LINE_ROOM (4 * PATH_MAX)
/* The environment of a child, ours in it: ``into`` has room for two more than ``environment`` has. */
static void with_ours(char *const environment[], char **into, char *preload)
{
  size_t n = 0;
  const char *theirs = "";
  for (; environment && *environment; environment++)
    if (names(*environment, "LD_PRELOAD"))
      theirs = *environment + 11;
    else if (!names(*environment, "OARS_FILES"))
      into[n++] = *environment;
  strcpy(preload, "LD_PRELOAD=");
  if (*theirs && strlen(theirs) < LINE_ROOM - PATH_MAX - 20 && !strstr(theirs, library_path)) {
    strcat(preload, theirs);
    strcat(preload, ":");
  }
  strcat(preload, library_path);
  into[n++] = preload;
  into[n++] = environment_files;
  into[n] = NULL;
}

static size_t count(char *const list[])
{
  size_t n = 0;
  while (list && list[n]) n++;
  return n;
}

#define CHILD_ENVIRONMENT(environment)                                        \
  char **ours_ = alloca((count(environment) + 3) * sizeof *ours_);            \
  char *preload_ = alloca(LINE_ROOM);                                         \
  if (active()) {                                                             \
    expect_children();                                                        \
    with_ours(environment, ours_, preload_);                                  \
  } else                                                                      \
    ours_ = (char **)(environment)

int do_execve(int dirfd, const char *path, char *const argv[], char *const envp[], int flags)
{
  CHILD_ENVIRONMENT(envp);
  struct work *w = work_begin();
  const char *other = path && *path && !(flags & AT_EMPTY_PATH) ? stands_for(w, dirfd, path) : NULL;
  char *place = NULL;
  if (other) place = strdupa(other);
  work_end(w); /* before: the buffers are also those of a parent that waits in vfork */
  if (place) return (int)raw(SYS_execve, (long)place, (long)argv, (long)ours_, 0, 0, 0);
  if (dirfd == AT_FDCWD && !flags) return (int)raw(SYS_execve, (long)path, (long)argv, (long)ours_, 0, 0, 0);
  return (int)raw(SYS_execveat, dirfd, (long)path, (long)argv, (long)ours_, flags, 0);
}

EXPORT int execve(const char *path, char *const argv[], char *const envp[])
{
  return (int)border(do_execve(AT_FDCWD, path, argv, envp, 0));
}
EXPORT int execv(const char *path, char *const argv[]) { return execve(path, argv, environ); }
EXPORT int execveat(int dirfd, const char *path, char *const argv[], char *const envp[], int flags)
{
  return (int)border(do_execve(dirfd, path, argv, envp, flags));
}
EXPORT int fexecve(int fd, char *const argv[], char *const envp[])
{
  return (int)border(do_execve(fd, "", argv, envp, AT_EMPTY_PATH));
}

static int by_shell(const char *path, char *const argv[], char *const envp[])
{
  size_t n = count(argv);
  char **more = alloca((n + 3) * sizeof *more);
  more[0] = (char *)"/bin/sh";
  more[1] = (char *)path;
  for (size_t i = 1; i <= n; i++) more[i + 1] = argv[i];
  if (n <= 1) more[2] = NULL;
  return do_execve(AT_FDCWD, "/bin/sh", more, envp, 0);
}

EXPORT int execvpe(const char *file, char *const argv[], char *const envp[])
{
  if (!file || !*file) return (int)border(-ENOENT);
  int result;
  if (strchr(file, '/')) {
    result = do_execve(AT_FDCWD, file, argv, envp, 0);
    return (int)border(result == -ENOEXEC ? by_shell(file, argv, envp) : result);
  }
  const char *path = getenv("PATH");
  int denied = 0;
  result = -ENOENT;
  for (const char *at = path ? path : "/bin:/usr/bin", *end;; at = end + 1) {
    end = strchrnul(at, ':');
    char whole[PATH_MAX];
    if ((size_t)(end - at) + strlen(file) + 2 < sizeof whole) {
      memcpy(whole, at, (size_t)(end - at));
      whole[end - at] = 0;
      if (end > at) strcat(whole, "/");
      strcat(whole, file);
      result = do_execve(AT_FDCWD, whole, argv, envp, 0);
      if (result == -ENOEXEC) result = by_shell(whole, argv, envp);
      if (result == -EACCES) denied = 1;
      else if (result != -ENOENT && result != -ENOTDIR && result != -ESTALE && result != -ENODEV && result != -ETIMEDOUT)
        break;
    }
    if (!*end) break;
  }
  return (int)border(denied && (result == -ENOENT || result == -ENOTDIR) ? -EACCES : result);
}
EXPORT int execvp(const char *file, char *const argv[]) { return execvpe(file, argv, environ); }

#define GATHERED(first, list)                                     \
  size_t n_ = 1;                                                  \
  va_list copy_;                                                  \
  va_copy(copy_, list);                                           \
  while (va_arg(copy_, char *)) n_++;                             \
  va_end(copy_);                                                  \
  char **argv = alloca((n_ + 1) * sizeof *argv);                  \
  argv[0] = (char *)first;                                        \
  for (size_t i_ = 1; i_ <= n_; i_++) argv[i_] = va_arg(list, char *)

EXPORT int execl(const char *path, const char *first, ...)
{
  va_list list;
  va_start(list, first);
  GATHERED(first, list);
  va_end(list);
  return execve(path, argv, environ);
}
EXPORT int execlp(const char *file, const char *first, ...)
{
  va_list list;
  va_start(list, first);
  GATHERED(first, list);
  va_end(list);
  return execvpe(file, argv, environ);
}
EXPORT int execle(const char *path, const char *first, ...)
{
  va_list list;
  va_start(list, first);
  GATHERED(first, list);
  char *const *envp = va_arg(list, char *const *);
  va_end(list);
  return execve(path, argv, envp);
}

EXPORT int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *how, char *const argv[], char *const envp[])
{
  CHILD_ENVIRONMENT(envp);
  return STANDING(int, path, LIBC(posix_spawn)(pid, for_it, actions, how, argv, ours_));
}

EXPORT int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                        const posix_spawnattr_t *how, char *const argv[], char *const envp[])
{
  if (file && strchr(file, '/')) return posix_spawn(pid, file, actions, how, argv, envp);
  CHILD_ENVIRONMENT(envp);
  return LIBC(posix_spawnp)(pid, file, actions, how, argv, ours_);
}

/* What a child shall have open is opened in libc, past us: it is made ready here. */
EXPORT int posix_spawn_file_actions_addopen(posix_spawn_file_actions_t *actions, int fd, const char *path, int flags,
                                            mode_t mode)
{
  if (!active()) return LIBC(posix_spawn_file_actions_addopen)(actions, fd, path, flags, mode);
  if (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) {
    int made = do_open(AT_FDCWD, path, flags | O_CLOEXEC | O_NONBLOCK, mode);
    if (made < 0) return -made;
    sys_close(made);
    flags &= ~O_EXCL;
  }
  return STANDING(int, path, LIBC(posix_spawn_file_actions_addopen)(actions, fd, for_it, flags, mode));
}
EXPORT int posix_spawn_file_actions_addchdir_np(posix_spawn_file_actions_t *actions, const char *path)
{
  return STANDING(int, path, LIBC(posix_spawn_file_actions_addchdir_np)(actions, for_it));
}

/* libc starts a shell for these by itself, with the environment that is there. */
static lock shells_lock;
static int shells;

static void for_shells(int more)
{
  if (!active()) return;
  expect_children();
  lock_take(&shells_lock);
  shells += more;
  if (more > 0 && shells == 1) {
    size_t n = count(environ);
    char **all = alloca((n + 3) * sizeof *all), *preload = alloca(LINE_ROOM);
    with_ours(environ, all, preload);
    setenv("LD_PRELOAD", preload + 11, 1);
    setenv("OARS_FILES", strchr(environment_files, '=') + 1, 1);
  } else if (more < 0 && shells == 0) {
    char *theirs = getenv("LD_PRELOAD"), *ours = theirs ? strstr(theirs, library_path) : NULL;
    unsetenv("OARS_FILES");
    if (ours == theirs)
      unsetenv("LD_PRELOAD");
    else if (ours) {
      char *rest = strndupa(theirs, (size_t)(ours - theirs) - 1);
      setenv("LD_PRELOAD", rest, 1);
    }
  }
  lock_drop(&shells_lock);
}

EXPORT int system(const char *command)
{
  if (!command) return LIBC(system)(command);
  for_shells(1);
  int result = LIBC(system)(command);
  int why = errno;
  for_shells(-1);
  errno = why;
  return result;
}

EXPORT FILE *popen(const char *command, const char *how)
{
  for_shells(1);
  FILE *result = LIBC(popen)(command, how);
  int why = errno;
  for_shells(-1);
  errno = why;
  return result;
}
