/* Starting programs: they get this library, and what they are is looked up in this process's view. */
#include "files.h"
#include <alloca.h>
#include <spawn.h>

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
  if (active() && path && dirfd == AT_FDCWD && !flags) look_at_program(place ? place : path);
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
      else if (result != -ENOENT && result != -ENOTDIR && result != -ESTALE && result != -ENODEV &&
               result != -ETIMEDOUT)
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
  return STANDING(int, path, (active() ? look_at_program(for_it) : (void)0,
                              LIBC(posix_spawn)(pid, for_it, actions, how, argv, ours_)));
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

void shells_look(int begin)
{
  if (begin)
    lock_take(&shells_lock);
  else
    lock_drop(&shells_lock);
}

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
