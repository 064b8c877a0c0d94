/* Folders: listing them, and libc's functions that walk them or make names in them.
 *
 * A listing is libc's own (DIR) of the folder that stands for the script's. Where this process sees something else in
 * it, what it sees lies beside it, and readdir gives that.
 */
#include "files.h"
#include <glob.h>
#include <sys/random.h>

#define ALIAS(name) __attribute__((alias(#name), visibility("default")))
#define SAME(to, from) extern __typeof__(from) to ALIAS(from)

struct listing { struct listing *next; DIR *dir; struct names names; size_t at; long count; struct dirent64 now; };
static struct listing *listings;
static lock listings_lock;

void listings_look(int begin)
{
  if (begin)
    lock_take(&listings_lock);
  else
    lock_drop(&listings_lock);
}

static struct listing *listing_of(DIR *dir)
{
  if (!listings) return NULL;
  lock_take(&listings_lock);
  struct listing *l = listings;
  while (l && l->dir != dir) l = l->next;
  lock_drop(&listings_lock);
  return l;
}

/* Whether this process sees in a folder what libc would not give, or in another order. */
static int differs(const struct place *p)
{
  if (p->state == THROUGH) return 0;
  if (p->state != LOWER) return 1;
  signals kept = signals_off();
  tables_look(1);
  const char *where = strcmp(p->where, "/") ? p->where : "";
  int result = folder_of(where) != NULL;
  for (char *up = strdupa(where); !result && config.side == VOICE && *up;) { /* below a folder that the run has made */
    const struct entry *e = entry_of(up);
    result = e && e->before == '-';
    *strrchr(up, '/') = 0;
  }
  tables_look(0);
  signals_back(kept);
  return result;
}

/* What this process sees in a folder, if libc would give something else; else NULL. */
static int beside(struct place *p, struct listing **seen)
{
  *seen = NULL;
  if (!differs(p)) return 0;
  struct listing *l = calloc(1, sizeof *l);
  if (!l) return -ENOMEM;
  int result = 0;
  for (;;) {
    unsigned news_before = news_number;
    names_free(&l->names);
    result = names_add(&l->names, ".", DT_DIR, 1);
    if (result >= 0) result = names_add(&l->names, "..", DT_DIR, 1);
    if (result >= 0) {
      struct names inner = {0};
      result = names_in(p, &inner);
      size_t at = 0;
      for (struct name *n; result >= 0 && (n = name_at(&inner, &at));)
        result = names_add(&l->names, n->text, n->type, n->inode);
      names_free(&inner);
    }
    news();
    if (news_before == news_number) break;
  }
  if (result < 0) {
    names_free(&l->names);
    free(l);
  } else
    *seen = l;
  return result;
}

/* libc's listing of ``fd`` with what this process sees in ``p`` beside it. If it fails ``fd`` stays open. */
static DIR *listed(int fd, struct place *p)
{
  struct listing *seen;
  int result = beside(p, &seen);
  DIR *dir = result < 0 ? NULL : LIBC(fdopendir)(fd);
  if (result < 0) errno = -result;
  if (!seen) return dir;
  if (!dir) {
    names_free(&seen->names);
    free(seen);
    return NULL;
  }
  seen->dir = dir;
  lock_take(&listings_lock);
  seen->next = listings;
  listings = seen;
  lock_drop(&listings_lock);
  return dir;
}

EXPORT DIR *opendir(const char *path)
{
  if (!active()) return LIBC(opendir)(path);
  struct work *w = work_begin();
  DIR *dir = NULL;
  if (absolute(AT_FDCWD, path, w->first) < 0)
    dir = LIBC(opendir)(path);
  else {
    int fd;
    LOOK(fd, w, &w->a, w->first, 1, sys_open(w->a.target, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK, 0));
    if (fd < 0)
      errno = -fd;
    else if (!(dir = listed(fd, &w->a)))
      sys_close(fd);
  }
  work_end(w);
  return dir;
}

/* What the open folder ``fd`` is in this process's view, in w->a: ABSENT when it, or one above it, has gone since. */
static int open_folder(struct work *w, int fd)
{
  if (descriptor_where(fd, w->first) < 0) return 0;
  int result = find(w, &w->a, w->first, 1);
  if (result == -ENOENT) w->a.state = ABSENT;
  return result >= 0 || result == -ENOENT;
}

EXPORT DIR *fdopendir(int fd)
{
  if (!active()) return LIBC(fdopendir)(fd);
  struct work *w = work_begin();
  DIR *dir = open_folder(w, fd) ? listed(fd, &w->a) : LIBC(fdopendir)(fd);
  work_end(w);
  return dir;
}

EXPORT struct dirent64 *readdir64(DIR *dir)
{
  struct listing *l = listing_of(dir);
  if (!l) return LIBC(readdir64)(dir);
  struct name *n = name_at(&l->names, &l->at);
  if (!n) return NULL;
  l->now.d_ino = n->inode ? n->inode : 1;
  l->now.d_off = ++l->count;
  l->now.d_type = n->type;
  l->now.d_reclen = sizeof l->now;
  strncpy(l->now.d_name, n->text, sizeof l->now.d_name - 1);
  return &l->now;
}
extern struct dirent *readdir(DIR *dir) ALIAS(readdir64);

EXPORT int readdir64_r(DIR *dir, struct dirent64 *entry, struct dirent64 **result)
{
  int before = errno;
  errno = 0;
  struct dirent64 *next = readdir64(dir);
  *result = next ? entry : NULL;
  if (next) memcpy(entry, next, offsetof(struct dirent64, d_name) + strlen(next->d_name) + 1);
  int why = errno;
  errno = before;
  return why;
}
extern int readdir_r(DIR *dir, struct dirent *entry, struct dirent **result) ALIAS(readdir64_r);

EXPORT void seekdir(DIR *dir, long place)
{
  struct listing *l = listing_of(dir);
  if (!l) {
    LIBC(seekdir)(dir, place);
    return;
  }
  l->at = 0;
  for (l->count = 0; l->count < place && name_at(&l->names, &l->at); l->count++) {}
}

EXPORT long telldir(DIR *dir)
{
  struct listing *l = listing_of(dir);
  return l ? l->count : LIBC(telldir)(dir);
}

EXPORT void rewinddir(DIR *dir)
{
  struct listing *l = listing_of(dir);
  LIBC(rewinddir)(dir);
  if (!l) return;
  l->at = 0;
  l->count = 0;
  struct work *w = work_begin(); /* what is there now */
  struct names fresh = {0};
  if (open_folder(w, dirfd(dir)) && names_in(&w->a, &fresh) >= 0) {
    names_free(&l->names);
    names_add(&l->names, ".", DT_DIR, 1);
    names_add(&l->names, "..", DT_DIR, 1);
    size_t at = 0;
    for (struct name *n; (n = name_at(&fresh, &at));) names_add(&l->names, n->text, n->type, n->inode);
  }
  names_free(&fresh);
  work_end(w);
}

EXPORT int closedir(DIR *dir)
{
  struct listing *found = NULL;
  if (listings) {
    lock_take(&listings_lock);
    for (struct listing **l = &listings; *l; l = &(*l)->next)
      if ((*l)->dir == dir) {
        found = *l;
        *l = found->next;
        break;
      }
    lock_drop(&listings_lock);
  }
  if (found) {
    names_free(&found->names);
    free(found);
  }
  return LIBC(closedir)(dir);
}

static int scan(int dirfd, const char *path, struct dirent64 ***list, int (*wanted)(const struct dirent64 *),
                int (*compare)(const struct dirent64 **, const struct dirent64 **))
{
  int fd = do_open(dirfd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd < 0) return (int)border(fd);
  DIR *dir = fdopendir(fd);
  if (!dir) {
    sys_close(fd);
    return -1;
  }
  struct dirent64 **found = NULL, *entry;
  size_t count = 0, room = 0;
  int failed = 0;
  while (!failed && (entry = readdir64(dir))) {
    if (wanted && !wanted(entry)) continue;
    if (count == room) {
      struct dirent64 **wider = realloc(found, (room = room ? room * 2 : 16) * sizeof *found);
      if (!wider) failed = 1;
      else found = wider;
    }
    size_t size = offsetof(struct dirent64, d_name) + strlen(entry->d_name) + 1;
    struct dirent64 *copy = failed ? NULL : malloc(size);
    if (!copy)
      failed = 1;
    else
      found[count++] = memcpy(copy, entry, size);
  }
  closedir(dir);
  if (failed) {
    while (count) free(found[--count]);
    free(found);
    errno = ENOMEM;
    return -1;
  }
  if (compare && count) qsort(found, count, sizeof *found, (int (*)(const void *, const void *))compare);
  *list = found;
  return (int)count;
}

EXPORT int scandir64(const char *path, struct dirent64 ***list, int (*wanted)(const struct dirent64 *),
                     int (*compare)(const struct dirent64 **, const struct dirent64 **))
{
  return scan(AT_FDCWD, path, list, wanted, compare);
}
EXPORT int scandirat64(int dirfd, const char *path, struct dirent64 ***list, int (*wanted)(const struct dirent64 *),
                       int (*compare)(const struct dirent64 **, const struct dirent64 **))
{
  return scan(dirfd, path, list, wanted, compare);
}
extern int scandir(const char *path, struct dirent ***list, int (*wanted)(const struct dirent *),
                   int (*compare)(const struct dirent **, const struct dirent **)) ALIAS(scandir64);
extern int scandirat(int dirfd, const char *path, struct dirent ***list, int (*wanted)(const struct dirent *),
                     int (*compare)(const struct dirent **, const struct dirent **)) ALIAS(scandirat64);

EXPORT int glob(const char *pattern, int flags, int (*failed)(const char *, int), glob_t *found)
{
  if (active() && !(flags & GLOB_ALTDIRFUNC)) {
    found->gl_opendir = (void *(*)(const char *))opendir;
    found->gl_readdir = (struct dirent * (*)(void *)) readdir;
    found->gl_closedir = (void (*)(void *))(void *)closedir;
    found->gl_stat = stat;
    found->gl_lstat = lstat;
    flags |= GLOB_ALTDIRFUNC;
  }
  return LIBC(glob)(pattern, flags, failed, found);
}
extern int glob64(const char *pattern, int flags, int (*failed)(const char *, int), glob64_t *found) ALIAS(glob);

/* ---- names that libc invents ---- */

static int invent(char *template, int after, int flags, int folder)
{
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  size_t length = strlen(template);
  if (after < 0 || length < (size_t)after + 6) return -EINVAL;
  char *where = template + length - (size_t)after - 6;
  if (strncmp(where, "XXXXXX", 6)) return -EINVAL;
  for (int tries = 0; tries < 10000; tries++) {
    unsigned char bytes[6];
    raw(SYS_getrandom, (long)bytes, 6, 0, 0, 0, 0);
    for (int i = 0; i < 6; i++) where[i] = letters[bytes[i] % 62];
    int result = folder ? do_mkdir(AT_FDCWD, template, 0700)
                        : do_open(AT_FDCWD, template, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, 0600);
    if (result != -EEXIST) return result;
  }
  return -EEXIST;
}

EXPORT int mkstemp(char *template) { return (int)border(invent(template, 0, 0, 0)); }
EXPORT int mkostemp(char *template, int flags) { return (int)border(invent(template, 0, flags, 0)); }
EXPORT int mkstemps(char *template, int after) { return (int)border(invent(template, after, 0, 0)); }
EXPORT int mkostemps(char *template, int after, int flags) { return (int)border(invent(template, after, flags, 0)); }
EXPORT char *mkdtemp(char *template) { return border(invent(template, 0, 0, 1)) < 0 ? NULL : template; }
SAME(mkstemp64, mkstemp);
SAME(mkostemp64, mkostemp);
SAME(mkstemps64, mkstemps);
SAME(mkostemps64, mkostemps);
