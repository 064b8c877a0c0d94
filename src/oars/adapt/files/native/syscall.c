/* syscall(): programs and libraries that skip libc's functions, but not libc; and calls that the kernel hands back. */
#include "files.h"

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
  case SYS_flock: return do_flock((int)a, (int)b);
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
