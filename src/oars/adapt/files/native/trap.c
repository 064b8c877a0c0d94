/* System calls that do not go through libc: code that has the instruction itself (Rust's rustix, in safetensors).
 *
 * Linux can hand a thread's system calls back to it as a signal, but for those of one piece of its code ("syscall user
 * dispatch", since 5.11, on x86-64). That piece is libc, whose calls we stand before already. All others come here and
 * go the way of syscall(). It costs such a call a microsecond or two, so it begins only once a library is loaded whose
 * code has a system call that names a file. On other machines one line says that such a library is past us.
 */
#include "files.h"
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <ucontext.h>

static volatile int armed; /* threads ask for it from here on */
static char late[PATH_MAX]; /* the library that made us */

#if defined(__x86_64__)
#include <emmintrin.h>

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#endif
enum { ALLOW = 0, HAND_BACK = 1 };

static __thread char selector;
static __thread int this_thread;
static unsigned long libc_start, libc_length;

static int find_libc(struct dl_phdr_info *info, size_t size, void *unused)
{
  (void)size;
  (void)unused;
  if (!strstr(info->dlpi_name, "/libc.so.6") && !strstr(info->dlpi_name, "/libc-2.")) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_phdr[i].p_flags & PF_X) {
      libc_start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
      libc_length = info->dlpi_phdr[i].p_memsz;
      return 1;
    }
  return 0;
}

static void handed_back(int number, siginfo_t *info, void *context)
{
  (void)number;
  (void)info;
  greg_t *g = ((ucontext_t *)context)->uc_mcontext.gregs;
  long call = g[REG_RAX];
  int before = errno;
  switch (call) {
  case SYS_clone: /* these go on with another stack, or change what a handler's end puts back: let it be done there */
  case SYS_clone3:
  case SYS_fork:
  case SYS_vfork:
  case SYS_rt_sigreturn:
  case SYS_sigaltstack:
    selector = ALLOW;
    g[REG_RIP] -= 2;
    break;
  case SYS_rt_sigprocmask: {
    uint64_t *mask = (uint64_t *)&((ucontext_t *)context)->uc_sigmask, was = *mask;
    const uint64_t *set = (const uint64_t *)g[REG_RSI];
    if (set) *mask = g[REG_RDI] == SIG_BLOCK ? was | *set : g[REG_RDI] == SIG_UNBLOCK ? was & ~*set : *set;
    *mask &= ~((uint64_t)1 << (SIGSYS - 1));
    if (g[REG_RDX]) *(uint64_t *)g[REG_RDX] = was;
    g[REG_RAX] = 0;
    break;
  }
  default:
    g[REG_RAX] = do_call(call, g[REG_RDI], g[REG_RSI], g[REG_RDX], g[REG_R10], g[REG_R8], g[REG_R9]);
  }
  errno = before;
}

static void unblock(void)
{
  sigset_t ours;
  sigemptyset(&ours);
  sigaddset(&ours, SIGSYS);
  raw(SYS_rt_sigprocmask, SIG_UNBLOCK, (long)&ours, 0, 8, 0, 0);
}

void trap_this_thread(void)
{
  if (!armed) return;
  unblock();
  if (raw(SYS_prctl, PR_SET_SYSCALL_USER_DISPATCH, 1, (long)libc_start, (long)libc_length, (long)&selector, 0) < 0)
    return;
  selector = HAND_BACK;
  this_thread = 1;
}

static int arm(void)
{
  dl_iterate_phdr(find_libc, NULL);
  if (!libc_start) return -ENOSYS;
  static const unsigned char gadget[] = {0x0f, 0x05, 0xc3}; /* syscall; ret */
  void *found = memmem((void *)libc_start, libc_length, gadget, sizeof gadget);
  if (!found) return -ENOSYS;
  struct sigaction how = {.sa_sigaction = handed_back, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
  if (sigaction(SIGSYS, &how, NULL) < 0) return -errno;
  raw_by = found;
  armed = 1;
  trap_this_thread();
  if (!this_thread) armed = 0;
  return this_thread ? 0 : -ENOSYS;
}

/* The next "syscall" (0f 05). To import torch is to load 60 MB of code: memmem took 2 % of that time. */
static const unsigned char *next_call(const unsigned char *at, const unsigned char *end)
{
  const __m128i first = _mm_set1_epi8(0x0f), second = _mm_set1_epi8(0x05);
  for (; end - at > 16; at += 16) {
    __m128i one = _mm_loadu_si128((const __m128i *)at), other = _mm_loadu_si128((const __m128i *)(at + 1));
    int both = _mm_movemask_epi8(_mm_and_si128(_mm_cmpeq_epi8(one, first), _mm_cmpeq_epi8(other, second)));
    if (both) return at + __builtin_ctz((unsigned)both);
  }
  for (; end - at > 1; at++)
    if (at[0] == 0x0f && at[1] == 0x05) return at;
  return NULL;
}

/* Whether code has a system call that names a file: "mov $number, %eax" shortly before "syscall". */
static int names_files(const unsigned char *code, size_t length)
{
  static const unsigned short numbers[] = {
      SYS_rename, SYS_mkdir, SYS_rmdir, SYS_creat, SYS_link, SYS_unlink, SYS_symlink, SYS_openat, SYS_mkdirat,
      SYS_mknodat, SYS_fchownat, SYS_newfstatat, SYS_unlinkat, SYS_renameat, SYS_linkat, SYS_symlinkat, SYS_fchmodat,
      SYS_renameat2, SYS_statx, SYS_utimensat};
  const unsigned char *end = code + length;
  for (const unsigned char *at = code; (at = next_call(at, end)); at += 2)
    for (const unsigned char *mov = at - 5; mov >= code && mov > at - 48; mov--)
      if (mov[0] == 0xb8 && mov[3] == 0 && mov[4] == 0)
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
          if ((mov[1] | mov[2] << 8) == numbers[i]) return 1;
  return 0;
}

#else

static int arm(void) { return -ENOSYS; }
void trap_this_thread(void) {}
static int names_files(const unsigned char *code, size_t length)
{
  static const char rust[] = "rustix"; /* its panics name its sources */
  return memmem(code, length, rust, sizeof rust - 1) != NULL;
}

#endif

#define LARGEST (64u << 20) /* larger ones (frameworks) were looked at once, and take long */
static unsigned long looked_at[4096];
static unsigned looked_count;

static int look(struct dl_phdr_info *info, size_t size, void *unused)
{
  (void)size;
  (void)unused;
  for (unsigned i = 0; i < looked_count; i++)
    if (looked_at[i] == info->dlpi_addr) return 0;
  if (looked_count < 4096) looked_at[looked_count++] = info->dlpi_addr;
  const char *name = info->dlpi_name, *last = strrchr(name, '/');
  last = last ? last + 1 : name;
  if (!*name || !strcmp(name, library_path) || !strncmp(last, "libc.so", 7) || !strncmp(last, "ld-", 3) ||
      !strncmp(last, "linux-vdso", 10) || !strncmp(last, "libpthread", 10))
    return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *part = &info->dlpi_phdr[i];
    if (part->p_type == PT_LOAD && part->p_flags & PF_X && part->p_memsz < LARGEST &&
        names_files((const unsigned char *)info->dlpi_addr + part->p_vaddr, part->p_memsz)) {
      strncpy(late, name, sizeof late - 1);
      return 1;
    }
  }
  return 0;
}

/* Libraries may have been loaded since. */
void trap_look(void)
{
  static int said;
  if (armed || said || config.side == OFF || !dl_iterate_phdr(look, NULL)) return;
  if (arm() < 0) {
    said = 1;
    static const char tell[] = "oars: this library changes files by system calls of its own, which this system "
                               "does not show us; what it writes is written by every rank: ";
    sys_write(2, tell, sizeof tell - 1);
    sys_write(2, late, strlen(late));
    sys_write(2, "\n", 1);
  }
}

/* ---- threads, and masks that would make the signal deadly ---- */

struct begun { void *(*run)(void *); void *argument; };

static void *begin_thread(void *given)
{
  struct begun b = *(struct begun *)given;
  free(given);
  trap_this_thread();
  return b.run(b.argument);
}

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument)
{
  struct begun *b = armed ? malloc(sizeof *b) : NULL;
  if (!b) return LIBC(pthread_create)(thread, how, run, argument);
  b->run = run;
  b->argument = argument;
  int result = LIBC(pthread_create)(thread, how, begin_thread, b);
  if (result) free(b);
  return result;
}

EXPORT int pthread_sigmask(int how, const sigset_t *set, sigset_t *old)
{
  int result = LIBC(pthread_sigmask)(how, set, old);
#if defined(__x86_64__)
  if (this_thread && set && how != SIG_UNBLOCK) unblock();
#endif
  return result;
}

EXPORT int sigprocmask(int how, const sigset_t *set, sigset_t *old)
{
  int result = LIBC(sigprocmask)(how, set, old);
#if defined(__x86_64__)
  if (this_thread && set && how != SIG_UNBLOCK) unblock();
#endif
  return result;
}

EXPORT const char *oars_files_past_libc(void) { return late; } /* the library that goes past libc, if one was met */
