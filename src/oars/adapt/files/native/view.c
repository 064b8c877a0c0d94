/* What a path stands for in this process's view.
 *
 * The file system as it was for the run (the real one, with the voice's changes undone by its ledger), and over it
 * this rank's own changes, which live in a mirror tree: what the script knows as /a/b is <root>/tree/a/b.
 *
 *   THROUGH  devices, caches, the run folder: real for everyone
 *   LOWER    untouched by anyone: the real path itself
 *   KEPT     changed or removed by the voice: the original that it kept
 *   HERE     a file or link of this rank's, in the mirror
 *   NEW      a folder of this rank's, in the mirror, with nothing real below it
 *   PURE     anything inside such a folder, where the mirror alone counts and nothing is written down
 *   ABSENT   removed by this rank, or made by the voice
 *
 * The voice may act at any moment. It writes its line before it changes anything, so a look is: act on the place that
 * was found, then ask whether the ledger grew, and if so look again (LOOK in files.h).
 *
 * On the voice every path is LOWER or THROUGH: what it sees is what is real.
 */
#include "files.h"

static lock ways_lock;

/* ---- what folders' names lead to ---- */

struct way { uint32_t hash; unsigned epoch; int kind; char *key, *where; };
#define WAYS 8192
static struct way ways[WAYS];
static volatile unsigned epoch = 1;
static char *ways_room;
static size_t ways_used;
#define WAYS_ROOM (4u << 20)

void forget_ways(void) { __sync_fetch_and_add(&epoch, 1); }

static uint32_t way_hash(const char *text)
{
  uint32_t h = 5381;
  for (; *text; text++) h = h * 33 ^ (unsigned char)*text;
  return h;
}

static int way_known(const char *key, char *where)
{
  uint32_t h = way_hash(key);
  lock_take(&ways_lock);
  struct way *way = &ways[h % WAYS];
  int kind = -1;
  if (way->epoch == epoch && way->hash == h && !strcmp(way->key, key)) {
    kind = way->kind;
    strcpy(where, way->where);
  }
  lock_drop(&ways_lock);
  return kind;
}

static void way_learnt(const char *key, const char *where, int kind, unsigned since)
{
  size_t n = strlen(key) + 1, m = strlen(where) + 1;
  uint32_t h = way_hash(key);
  if (!ways_room) ways_room = arena(WAYS_ROOM);
  lock_take(&ways_lock);
  if (ways_used + n + m > WAYS_ROOM) {
    ways_used = 0;
    memset(ways, 0, sizeof ways);
  }
  if (since == epoch) {
    struct way *way = &ways[h % WAYS];
    way->key = memcpy(ways_room + ways_used, key, n);
    way->where = memcpy(ways_room + ways_used + n, where, m);
    ways_used += n + m;
    way->hash = h;
    way->kind = kind;
    way->epoch = epoch;
  }
  lock_drop(&ways_lock);
}

int is_through(const char *path)
{
  size_t length = strlen(path);
  for (const char *each = config.through; each && *each; each += strlen(each) + 1) {
    size_t n = strlen(each);
    if (!strncmp(path, each, n) || (length == n - 1 && each[n - 1] == '/' && !strncmp(path, each, n - 1))) return 1;
  }
  return 0;
}

int parent_of(const char *path, char *out)
{
  const char *slash = strrchr(path, '/');
  size_t n = slash ? (size_t)(slash - path) : 0;
  memcpy(out, path, n);
  out[n] = 0;
  return (int)n;
}

/* ---- names ---- */

static int in_tree(const char *path)
{
  return config.side == OWN && !strncmp(path, config.tree, config.tree_length) &&
         (path[config.tree_length] == '/' || path[config.tree_length] == 0);
}

/* The script's name for a real path: without the mirror's folder, or what a kept original stood for. */
void script_name(char *path)
{
  if (config.side != OWN) return;
  if (in_tree(path)) {
    size_t length = strlen(path + config.tree_length);
    memmove(path, path + config.tree_length, length + 1);
    if (!length) strcpy(path, "/");
  } else if (!strncmp(path, config.kept, config.kept_length) && path[config.kept_length] == '/') {
    const struct entry *found = NULL;
    char name[NAME_MAX + 1];
    strncpy(name, path + config.kept_length + 1, NAME_MAX);
    name[NAME_MAX] = 0;
    found = entry_kept_as(name);
    if (found) strcpy(path, found->path);
  }
}

/* The script's name for what this process has open, or is in. ``path``: what the kernel calls it now. A real folder
 * that the voice has removed or moved since is known by its number, which the voice wrote down with it. What lies in
 * the mirror is known by its name alone: the voice never moves it, and its number may be one that a removal has set
 * free. */
int where_it_was(char *path, const char *proc)
{
  size_t length = strlen(path);
  int gone = length > 10 && !strcmp(path + length - 10, " (deleted)"), result = -EOPNOTSUPP;
  int real = config.side == OWN && !in_tree(path);
  script_name(path);
  if (!real) return gone ? -EOPNOTSUPP : 0;
  news(); /* the voice wrote it down before it did it */
  signals kept = signals_off();
  tables_look(1);
  const struct entry *e = entry_of(path);
  struct stat st;
  if (!gone && !(e && e->before == '-' && !e->mine))
    result = 0;
  else if (sys_stat(proc, &st, 0) == 0 && (e = entry_numbered(st.st_ino))) {
    strcpy(path, e->path);
    result = 0;
  } else if (!gone)
    result = 0;
  tables_look(0);
  signals_back(kept);
  return result;
}

int descriptor_where(int fd, char *out)
{
  char link[32] = "/proc/self/fd/", digits[12];
  int n = 0, at = 14;
  if (fd < 0) return -EBADF;
  do digits[n++] = (char)('0' + fd % 10); while (fd /= 10);
  while (n) link[at++] = digits[--n];
  link[at] = 0;
  long length = sys_readlink(link, out, BIG);
  if (length < 0) return (int)length;
  if (out[0] != '/') return -EOPNOTSUPP;
  return where_it_was(out, link);
}

/* ``path`` from the root; -EOPNOTSUPP: nothing that we know about, the kernel decides. */
int absolute(int dirfd, const char *path, char *out)
{
  if (!path || !*path) return -EOPNOTSUPP;
  size_t length = strnlen(path, PATH_MAX);
  if (length >= PATH_MAX) return -EOPNOTSUPP; /* too long, says the kernel */
  if (*path == '/') {
    memcpy(out, path, length + 1);
    return 0;
  }
  size_t n;
  if (dirfd == AT_FDCWD) {
    long got = raw(SYS_getcwd, (long)out, BIG - PATH_MAX, 0, 0, 0, 0);
    if (got < 0) {
      got = sys_readlink("/proc/self/cwd", out, BIG - PATH_MAX); /* deeper than getcwd can say, or deleted */
      if (got < 0) return -EOPNOTSUPP;
    }
    if (out[0] != '/') return -EOPNOTSUPP;
    if (where_it_was(out, "/proc/self/cwd") < 0) return -EOPNOTSUPP;
  } else {
    int result = descriptor_where(dirfd, out);
    if (result < 0) return -EOPNOTSUPP;
  }
  n = strlen(out);
  if (n + length + 2 > BIG) return -EOPNOTSUPP;
  if (n && out[n - 1] != '/') out[n++] = '/';
  memcpy(out + n, path, length + 1);
  return 0;
}

/* ---- finding ---- */

/* Where ``name`` in the folder ``where`` (of this kind) is; fills in p. */
static void stand(struct place *p, int kind, const char *where, const char *name, size_t length)
{
  size_t n = strlen(where);
  if (p->where != where) memcpy(p->where, where, n);
  p->where[n] = '/';
  memcpy(p->where + n + 1, name, length);
  p->where[n + 1 + length] = 0;
  p->state = kind;
  int mirror = kind == PURE;
  if (kind == LOWER && config.side == OWN) {
    const struct entry *e = entry_of(p->where);
    if (e && e->mine) {
      p->state = e->mine == GONE ? ABSENT : e->mine;
      mirror = p->state != ABSENT;
    } else if (e && e->before == '-')
      p->state = ABSENT;
    else if (e && e->before) {
      p->state = KEPT;
      memcpy(p->target, config.kept, config.kept_length);
      p->target[config.kept_length] = '/';
      strcpy(p->target + config.kept_length + 1, e->kept);
      return;
    }
  }
  if (mirror) {
    memcpy(p->target, config.tree, config.tree_length);
    strcpy(p->target + config.tree_length, p->where);
  } else
    strcpy(p->target, p->where);
}

/* What kind of folder the canonical path ``where`` is. */
static int kind_of(char *where)
{
  if (is_through(where)) return THROUGH;
  if (config.side != OWN) return LOWER;
  for (char *slash = where; *slash;) {
    char *end = strchr(slash + 1, '/');
    if (end) *end = 0;
    const struct entry *e = entry_of(where);
    if (end) *end = '/';
    if (e && e->mine == NEW) return PURE;
    if (!end) break;
    slash = end;
  }
  return LOWER;
}

/* The folder that the way ``path`` (absolute, no slash at its end) leads to: its kind, and its canonical name in
 * ``where``. ``path`` is used up. */
static int enter(struct work *w, char *path, char *where, int *hops)
{
  unsigned since = epoch;
  if (!*path) {
    where[0] = 0;
    return LOWER;
  }
  int kind = way_known(path, where);
  if (kind >= 0) return kind;
  /* the longest known beginning */
  size_t known = 0, length = strlen(path);
  kind = LOWER;
  where[0] = 0;
  for (size_t cut = length; cut-- > 1;)
    if (path[cut] == '/') {
      path[cut] = 0;
      int found = way_known(path, where);
      path[cut] = '/';
      if (found >= 0) {
        kind = found;
        known = cut;
        break;
      }
    }
  if (!known) where[0] = 0;
  int spelled = 1; /* path so far is what the script wrote: worth remembering */
  char *at = path + known;
  struct place *p = &w->c;
  while (*at) {
    while (*at == '/') at++;
    char *end = strchrnul(at, '/');
    size_t n = (size_t)(end - at);
    if (n == 0) break;
    if (n == 1 && at[0] == '.') {
      at = end;
      continue;
    }
    if (n == 2 && at[0] == '.' && at[1] == '.') {
      char *slash = strrchr(where, '/');
      if (slash) *slash = 0;
      kind = kind_of(where);
      at = end;
      continue;
    }
    if (kind == THROUGH) { /* the kernel's business */
      size_t m = strlen(where);
      if (m + n + 2 > BIG) return -ENAMETOOLONG;
      where[m] = '/';
      memcpy(where + m + 1, at, n);
      where[m + 1 + n] = 0;
      at = end;
      continue;
    }
    if (n > NAME_MAX || strlen(where) + n + 2 > BIG - PATH_MAX) return -ENAMETOOLONG;
    stand(p, kind, where, at, n);
    if (is_through(p->where)) {
      strcpy(where, p->where);
      kind = THROUGH;
      at = end;
      continue;
    }
    if (p->state == ABSENT) return -ENOENT;
    struct stat st;
    int there = sys_stat(p->target, &st, AT_SYMLINK_NOFOLLOW);
    if (there < 0) return there;
    if (S_ISLNK(st.st_mode)) {
      if (++*hops > 40) return -ELOOP;
      long m = sys_readlink(p->target, w->link, PATH_MAX);
      if (m < 0) return (int)m;
      size_t rest = strlen(end);
      if ((size_t)m + rest + 2 > BIG) return -ENAMETOOLONG;
      memmove(path + m, end, rest + 1); /* link + rest; path's buffer is BIG */
      memcpy(path, w->link, (size_t)m);
      at = path;
      if (path[0] == '/') {
        where[0] = 0;
        kind = LOWER;
      }
      spelled = 0;
      continue;
    }
    if (!S_ISDIR(st.st_mode)) return -ENOTDIR;
    strcpy(where, p->where);
    kind = p->state == NEW || p->state == PURE ? PURE : LOWER;
    if (spelled) {
      char was = *end;
      *end = 0;
      way_learnt(path, where, kind, since);
      *end = was;
    }
    at = end;
  }
  return kind;
}

static int find_once(struct work *w, struct place *p, char *path, int *hops)
{
  size_t length = strlen(path);
  int slash = 0;
  while (length > 1 && path[length - 1] == '/') {
    path[--length] = 0;
    slash = 1;
  }
  char *cut = strrchr(path, '/');
  const char *tail = cut + 1;
  size_t n = strlen(tail);
  if (n == 0 || (n == 1 && tail[0] == '.') || (n == 2 && tail[0] == '.' && tail[1] == '.')) {
    /* a folder by way of itself */
    if (n == 0) path[0] = 0;
    int kind = enter(w, path, w->walk, hops);
    if (kind < 0) return kind;
    if (!w->walk[0]) {
      strcpy(p->where, "/");
      strcpy(p->target, "/");
      p->state = LOWER;
      return 0;
    }
    strcpy(path, w->walk);
    if (kind == THROUGH) {
      strcpy(p->where, path);
      strcpy(p->target, path);
      p->state = THROUGH;
      return 0;
    }
    cut = strrchr(path, '/');
    tail = cut + 1;
    n = strlen(tail);
    slash = 1;
  }
  memcpy(w->more, tail, n + 1); /* the way is used up by enter */
  *cut = 0;
  char *where = w->walk;
  int kind = enter(w, path, where, hops);
  if (kind < 0) return kind;
  if (n > NAME_MAX || strlen(where) + n + 2 > BIG - PATH_MAX) return -ENAMETOOLONG;
  stand(p, kind, where, w->more, n);
  if (p->state != THROUGH && is_through(p->where)) {
    p->state = THROUGH;
    strcpy(p->target, p->where);
  }
  if (slash && p->state != ABSENT) strcat(p->target, "/");
  return slash;
}

/* Where ``path`` (absolute) is; a symbolic link at its end is followed if ``follow``. ``path`` stays as it is. */
int find(struct work *w, struct place *p, const char *path, int follow)
{
  int hops = 0;
  signals kept = signals_off();
  tables_look(1);
  strcpy(w->head, path);
  int result;
  for (;;) {
    p->looked = 0;
    result = find_once(w, p, w->head, &hops);
    if (result < 0 || !(follow || result == 1) || p->state == THROUGH || p->state == ABSENT) break;
    size_t n = strlen(p->target);
    if (result == 1 && n > 1) p->target[n - 1] = 0;
    p->error = sys_stat(p->target, &p->st, AT_SYMLINK_NOFOLLOW);
    p->looked = result != 1;
    if (p->error < 0 || !S_ISLNK(p->st.st_mode)) {
      if (result == 1 && n > 1) p->target[n - 1] = '/';
      break;
    }
    if (++hops > 40) {
      result = -ELOOP;
      break;
    }
    long m = sys_readlink(p->target, w->link, PATH_MAX);
    if (m < 0) {
      result = (int)m;
      break;
    }
    if (w->link[0] == '/')
      strcpy(w->head, w->link);
    else {
      size_t cut = (size_t)(strrchr(p->where, '/') - p->where) + 1;
      memcpy(w->head, p->where, cut);
      strcpy(w->head + cut, w->link);
    }
    if (result == 1) strcat(w->head, "/");
  }
  tables_look(0);
  signals_back(kept);
  return result < 0 ? result : 0;
}

int settled(struct work *w, struct place *p, const char *path, int follow, struct stat *st)
{
  for (;;) {
    unsigned seen = news_number;
    int result = 0, found = find(w, p, path, follow);
    if (found >= 0 && p->state != ABSENT) {
      result = p->error;
      if (p->looked)
        *st = p->st;
      else
        result = sys_stat(p->target, st, p->state == THROUGH && follow ? 0 : AT_SYMLINK_NOFOLLOW);
      result = result == -ENOENT ? 0 : result < 0 ? result : 1;
    }
    news();
    if (seen == news_number) return found < 0 ? found : result; /* below zero: the folder itself may be missing */
    forget_ways();
  }
}
