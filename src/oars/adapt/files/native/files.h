/* One file system per rank, below Python: what all source files of this library share.
 *
 * The library stands between a process and libc (LD_PRELOAD). It does nothing until a rank says which side it is on
 * (control.c) or until a child of such a rank starts. Then every call that names a file goes through here:
 *
 *   calls.c changes.c dirs.c   libc's functions, as programs call them
 *   process.c programs.c       the working folder, sockets, descriptors; starting programs
 *   syscall.c trap.c           system calls by number; those that pass libc by
 *   names.c held.c             what a folder holds; what is open when a rank becomes the voice
 *   overlay.c                  changes of a rank that is not the voice: in its own mirror tree
 *   voice.c                    changes of the voice: what was there before is kept first
 *   view.c                     what a path stands for in this process's view
 *   tables.c gate.c            what is known of changed paths, the two logs that processes share it by, and the gate
 *   raw.c                      system calls and memory, without libc: safe in signal handlers, before main, after vfork
 *
 * Nothing here calls malloc but where libc's own function would; functions return -errno inside and set errno at the
 * border only.
 */
#ifndef OARS_FILES_H
#define OARS_FILES_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* glibc 2.34 moved these to another library and gave them a new version. The old one is in every glibc: what is built
 * on a new system runs on an old one. */
#if defined __x86_64__ && defined __GLIBC__
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dladdr, dladdr@GLIBC_2.2.5");
#endif

#define BIG (3 * PATH_MAX) /* room for a path of the script's below the mirror's folder */
#define EXPORT __attribute__((visibility("default")))
#define LIMIT (1LL << 30) /* bytes: what we are willing to copy of a file that is about to change */

/* ---- raw.c ---- */
long raw(long number, long a, long b, long c, long d, long e, long f); /* -errno on failure */
int sys_open(const char *path, int flags, mode_t mode);
int sys_openat(int dirfd, const char *path, int flags, mode_t mode);
int sys_stat(const char *path, struct stat *st, int flags);
int sys_access(const char *path, int mode, int flags);
int sys_mkdir(const char *path, mode_t mode);
int sys_unlink(const char *path, int flags);
int sys_rename(const char *from, const char *to, unsigned flags);
int sys_link(const char *from, const char *to, int flags);
int sys_symlink(const char *text, const char *path);
int sys_chmod(const char *path, mode_t mode);
int sys_chown(const char *path, uid_t uid, gid_t gid, int flags);
int sys_times(const char *path, const struct timespec *times, int flags);
long sys_readlink(const char *path, char *text, size_t room); /* the text ends with a 0 */
int sys_close(int fd);
long sys_write(int fd, const void *data, size_t length);
int sys_make_folders(const char *path); /* like mkdir -p */
typedef struct { uint64_t soft, hard; } limits;
int limits_lift(limits *kept, uint64_t size); /* -EFBIG: no file may be so large */
void limits_back(const limits *kept);
int copy_contents(int from, int to);
int copy_file(int from, const char *path, int empty); /* a new file with contents, mode and times of an open one */
long border(long result); /* sets errno */

void *arena(size_t bytes); /* memory that is never given back */
struct work *work_begin(void);
void work_end(struct work *work);
void work_forked(void);
void arena_look(int begin); /* around a fork */
typedef struct { uint64_t before; } signals;
signals signals_off(void);
void signals_back(signals kept);
void signal_taken(int number); /* within such a part: as if it had not come */
typedef struct { volatile int held; } lock;
void lock_take(lock *l);
int lock_try(lock *l, double seconds);
void lock_drop(lock *l);
void nap(long microseconds);
double seconds_now(void);

/* ---- tables.c ---- */
enum side { OFF, VOICE, OWN };
enum state { LOWER, THROUGH, KEPT, HERE, NEW, PURE, ABSENT, GONE };

struct entry { /* what is known of one path that somebody changed */
  struct entry *next, *next_in_folder;
  const char *path, *name; /* name: the part of path after the last slash */
  const char *kept; /* the original's name in kept/ */
  uint32_t hash;
  unsigned char before; /* what the voice found: '-' nothing, f file, d folder, l link; 0: it has not changed it */
  unsigned char mine;   /* HERE, NEW, GONE or 0 */
  unsigned char appended;
  unsigned listed;      /* the last listing of its folder that had it */
};
struct folder { struct folder *next; const char *path; struct entry *first; int mine; };

extern struct config {
  volatile enum side side;
  char token[64], shared[PATH_MAX], kept[PATH_MAX], root[PATH_MAX], tree[PATH_MAX];
  size_t root_length, tree_length, kept_length;
  pid_t voice_pid; /* the rank itself, not a child of it */
  char *through;   /* prefixes, each ended by a 0; an empty one ends the list */
} config;
extern __thread int plain_mode; /* this thread's calls pass as they are */
extern __thread long changes_made;
extern volatile unsigned news_number; /* grows with everything learnt from others */

extern volatile int loaded; /* control.c */
void load(void);
static inline int active(void)
{
  if (!loaded) load(); /* another library's constructor comes before ours */
  return config.side != OFF && !plain_mode;
}
int tables_open(enum side side);
void logs_are_read(void);
struct entry *entry_of(const char *path);
struct folder *folder_of(const char *path);
int note_before(unsigned char what, const char *kept, const char *path); /* to the ledger */
int mark(int state, const char *path);                                   /* to the journal; 0 forgets */
int log_voice(int speaking);
void news(void); /* take in what others have written down */

/* ---- strangers.c ---- */
void look_at_program(const char *path); /* before it is started */

/* ---- gate.c ---- */
extern int gate_fd, order_fd, turn_fd;
extern volatile int children;
void expect_children(void);
int gate_enter(signals *kept); /* before a change; waits for a promotion */
void gate_leave(signals *kept);
int gate_alone(double seconds);
void gate_open(void);
void turn_begin(signals *kept); /* around what the voice writes down, and its change */
void turn_noted(signals *kept); /* between the two */
void turn_end(void);
void turns_of_others_end(double seconds);
void tables_look(int begin); /* around what reads the tables */
void gate_pass(void);
const struct entry *entry_kept_as(const char *name);
const struct entry *entry_numbered(ino_t inode);
void born_of_a_rank(void);
void tables_before_fork(void);
void tables_after_fork(void);
int descriptor_is_ours(int fd);
void descriptor_moves(int fd);

/* ---- view.c ---- */
struct place {
  char where[BIG], target[BIG];
  int state, looked, error; /* looked: find has, with this error or none, and has left in st what it saw */
  struct stat st;
};
struct work { /* buffers of one operation; first and second hold its paths, more to link are find's own */
  struct place a, b, c;
  char first[BIG], second[BIG], more[BIG], head[BIG], walk[BIG], link[BIG], text[8][BIG];
};

int is_through(const char *path);
int absolute(int dirfd, const char *path, char *out); /* -EOPNOTSUPP: leave it to the kernel */
int find(struct work *w, struct place *p, const char *path, int follow);
int settled(struct work *w, struct place *p, const char *path, int follow, struct stat *st); /* 1: there, 0: not */
void forget_ways(void); /* what a folder's name leads to may have changed */
int descriptor_where(int fd, char *out);
int where_it_was(char *path, const char *proc);
void script_name(char *path); /* the script's name for a real path */
int parent_of(const char *path, char *out);

/* Look at a path until nothing new came between: result = act(place), again if there was news. */
#define LOOK(result, w, p, path, follow, act)                \
  do {                                                       \
    unsigned seen_ = news_number;                            \
    (result) = find(w, p, path, follow);                     \
    if ((result) >= 0) (result) = (p)->state == ABSENT ? -ENOENT : (act); \
    news();                                                  \
    if (seen_ == news_number) break;                         \
    forget_ways();                                           \
  } while (1)

/* ---- overlay.c ---- */
int own_open(struct work *w, const char *path, int flags, mode_t mode);
int own_mkdir(struct work *w, const char *path, mode_t mode);
int own_remove(struct work *w, const char *path, int folder);
int own_rename(struct work *w, const char *from, const char *to, unsigned flags);
int own_link(struct work *w, const char *from, const char *to, int follow);
int own_symlink(struct work *w, const char *text, const char *path);
int own_node(struct work *w, const char *path, mode_t mode, dev_t device);
int own_ready(struct work *w, const char *path, int follow, int write); /* w->a.target can be changed; holds the gate */
int permit(const char *place, int wanted);

/* ---- voice.c ---- */
void voice_writing(struct work *w, const char *path, int empty, int create, int exclusive, int append);
void voice_making(struct work *w, const char *path);
void voice_removing(struct work *w, const char *path);
void voice_renaming(struct work *w, const char *from, const char *to);
int voice_promise(struct work *w, const char *where, int in_place);

/* ---- names.c ---- */
struct names { char *data; size_t used, room; size_t count; };
struct name { uint64_t inode; unsigned char type; char text[]; };
#define NOW_VOICE (-5000) /* this process has just learnt that its rank is the voice */
int names_in(const struct place *p, struct names *all); /* what a folder holds for this process, in its order */
struct name *name_at(struct names *all, size_t *at);
int names_add(struct names *all, const char *text, unsigned char type, uint64_t inode);
void names_free(struct names *all);

/* ---- calls.c: each is libc's function, but for -errno ---- */
struct statx;
struct timespec;
int do_open(int dirfd, const char *path, int flags, mode_t mode);
int do_stat(int dirfd, const char *path, struct stat *st, int flags);
int do_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out);
int do_access(int dirfd, const char *path, int mode, int flags);
long do_readlink(int dirfd, const char *path, char *text, size_t room);

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

/* ---- changes.c ---- */
int do_mkdir(int dirfd, const char *path, mode_t mode);
int do_remove(int dirfd, const char *path, int flags);
int do_rename(int from_at, const char *from, int to_at, const char *to, unsigned flags);
int do_link(int from_at, const char *from, int to_at, const char *to, int flags);
int do_symlink(const char *text, int dirfd, const char *path);
int do_node(int dirfd, const char *path, mode_t mode, dev_t device);
long do_truncate(const char *path, off_t length);
long do_chmod(int dirfd, const char *path, mode_t mode);
long do_chown(int dirfd, const char *path, uid_t uid, gid_t gid, int flags);
long do_times(int dirfd, const char *path, const struct timespec *times, int flags);

/* ---- syscall.c ---- */
long do_call(long number, long a, long b, long c, long d, long e, long f);

/* ---- dirs.c, process.c, programs.c ---- */
void listings_look(int begin); /* around a fork */
void shells_look(int begin);
long do_getcwd(char *out, size_t room);
int do_chdir(const char *path);
int do_execve(int dirfd, const char *path, char *const argv[], char *const envp[], int flags);
long do_flock(int fd, int how);
long do_close_range(unsigned first, unsigned last, unsigned flags);
void *libc_function(const char *name);
const char *stands_for(struct work *w, int dirfd, const char *path);

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

#define LIBC(name) ((__typeof__(&name))({ static void *at_; if (!at_) at_ = libc_function(#name); at_; }))

/* ---- held.c ---- */
void held_follow(void);
void known_as(dev_t *device, ino_t *inode);

/* ---- trap.c ---- */
extern void *raw_by; /* the instruction within libc, once all other system calls are handed back to us */
void trap_look(void);
void trap_this_thread(void);

/* ---- control.c ---- */
extern char environment_files[PATH_MAX + 16], library_path[PATH_MAX]; /* OARS_FILES=..., for children */

#endif
