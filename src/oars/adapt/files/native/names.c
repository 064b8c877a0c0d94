/* What a folder holds for this process, in an order that is the same on every rank: what was there before the run as
 * the file system has it, then by name what the run has made. Where that lies in a folder is chance. */
#include "files.h"
#include <sys/mman.h>

struct kernel_entry { uint64_t inode; int64_t next; unsigned short length; unsigned char type; char name[]; };

int names_add(struct names *all, const char *text, unsigned char type, uint64_t inode)
{
  size_t length = strlen(text) + 1, need = (sizeof(struct name) + length + 7) & ~(size_t)7;
  if (all->used + need > all->room) {
    size_t room = all->room ? all->room * 2 : 1 << 16;
    while (room < all->used + need) room *= 2;
    char *wider = (char *)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if ((long)wider < 0 && (long)wider > -4096) return -ENOMEM;
    if (all->data) {
      memcpy(wider, all->data, all->used);
      raw(SYS_munmap, (long)all->data, (long)all->room, 0, 0, 0, 0);
    }
    all->data = wider;
    all->room = room;
  }
  struct name *n = (struct name *)(all->data + all->used);
  n->inode = inode;
  n->type = type;
  memcpy(n->text, text, length);
  all->used += need;
  all->count++;
  return 0;
}

struct name *name_at(struct names *all, size_t *at)
{
  if (*at >= all->used) return NULL;
  struct name *n = (struct name *)(all->data + *at);
  *at += (sizeof(struct name) + strlen(n->text) + 1 + 7) & ~(size_t)7;
  return n;
}

void names_free(struct names *all)
{
  if (all->data) raw(SYS_munmap, (long)all->data, (long)all->room, 0, 0, 0, 0);
  memset(all, 0, sizeof *all);
}

static int real_names(const char *path, struct names *all)
{
  int fd = sys_open(*path ? path : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return fd;
  size_t room = 1 << 16;
  char *data = (char *)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  long n = -ENOMEM;
  if (!((long)data < 0 && (long)data > -4096)) {
    while ((n = raw(SYS_getdents64, fd, (long)data, (long)room, 0, 0, 0)) > 0)
      for (long at = 0; at < n;) {
        struct kernel_entry *e = (struct kernel_entry *)(data + at);
        at += e->length;
        if (!strcmp(e->name, ".") || !strcmp(e->name, "..")) continue;
        int added = names_add(all, e->name, e->type, e->inode);
        if (added < 0) n = added;
        if (n < 0) break;
      }
    raw(SYS_munmap, (long)data, (long)room, 0, 0, 0, 0);
  }
  sys_close(fd);
  return (int)n;
}

static int by_name(const void *a, const void *b)
{
  return strcmp((*(struct name *const *)a)->text, (*(struct name *const *)b)->text);
}

/* Sort, without malloc: heap sort of pointers. */
static void sort_names(struct name **all, size_t n)
{
  for (size_t start = n / 2, end = n; end > 1;) {
    if (start > 0)
      start--;
    else {
      struct name *last = all[--end];
      all[end] = all[0];
      all[0] = last;
    }
    for (size_t root = start, child; (child = 2 * root + 1) < end; root = child) {
      if (child + 1 < end && by_name(&all[child], &all[child + 1]) < 0) child++;
      if (by_name(&all[root], &all[child]) >= 0) break;
      struct name *other = all[root];
      all[root] = all[child];
      all[child] = other;
    }
  }
}

/* Bring the names from ``first`` on (an offset) into order. */
static int order(struct names *all, size_t first)
{
  struct names sorted = {0};
  size_t count = 0, at = first, i = 0;
  while (name_at(all, &at)) count++;
  if (count < 2) return 0;
  size_t room = count * sizeof(struct name *);
  struct name **each = (struct name **)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if ((long)each < 0 && (long)each > -4096) return -ENOMEM;
  for (at = first; i < count;) each[i++] = name_at(all, &at);
  sort_names(each, count);
  int result = 0;
  for (i = 0; i < count && result >= 0; i++) result = names_add(&sorted, each[i]->text, each[i]->type, each[i]->inode);
  raw(SYS_munmap, (long)each, (long)room, 0, 0, 0, 0);
  if (result >= 0) memcpy(all->data + first, sorted.data, sorted.used);
  names_free(&sorted);
  return result;
}

static void whole(struct work *w, const char *folder, const char *name)
{
  strcpy(w->walk, strcmp(folder, "/") ? folder : "");
  strcat(w->walk, "/");
  strcat(w->walk, name);
}

static int made_by_the_run(struct work *w, const char *folder)
{
  strcpy(w->walk, folder);
  for (char *slash = w->walk + strlen(w->walk); slash; slash = strrchr(w->walk, '/')) {
    *slash = 0;
    const struct entry *e = *w->walk ? entry_of(w->walk) : NULL;
    if (e && e->before == '-') return 1;
  }
  return 0;
}

/* On the voice: what is real, what the run has made last. */
static int names_of_voice(struct work *w, const struct place *p, struct names *all)
{
  struct names real = {0};
  int result = real_names(p->target, &real);
  const char *folder = strcmp(p->where, "/") ? p->where : "";
  if (result >= 0 && made_by_the_run(w, folder)) {
    *all = real;
    return order(all, 0);
  }
  if (!folder_of(folder)) {
    *all = real;
    return result;
  }
  for (int last = 0; last < 2 && result >= 0; last++) {
    size_t at = 0, first = all->used;
    for (struct name *n; result >= 0 && (n = name_at(&real, &at));) {
      whole(w, folder, n->text);
      const struct entry *e = entry_of(w->walk);
      if ((e && e->before == '-') == last) result = names_add(all, n->text, n->type, n->inode);
    }
    if (last && result >= 0) result = order(all, first);
  }
  names_free(&real);
  return result;
}

static unsigned char type_of(const char *place, uint64_t *inode)
{
  struct stat st;
  *inode = 1;
  if (sys_stat(place, &st, AT_SYMLINK_NOFOLLOW) < 0) return DT_UNKNOWN;
  *inode = st.st_ino;
  return IFTODT(st.st_mode);
}

static int names_of_own(struct work *w, const struct place *p, struct names *all)
{
  static unsigned listing; /* guarded by the table's lock */
  struct names real = {0};
  const char *folder = strcmp(p->where, "/") ? p->where : "";
  if (p->state == ABSENT) return 0; /* one that is open still, and empty */
  if (p->state != LOWER && p->state != KEPT) {
    int result = real_names(p->target, all);
    return result < 0 || p->state == THROUGH ? result : order(all, 0);
  }
  int result = real_names(p->target, &real);
  if (result >= 0 && p->state == KEPT) real_names(p->where, &real); /* what is not written down is original */
  struct folder *f = folder_of(folder);
  unsigned now = ++listing;
  size_t at = 0;
  for (struct name *n; result >= 0 && (n = name_at(&real, &at));) {
    whole(w, folder, n->text);
    struct entry *e = f ? entry_of(w->walk) : NULL;
    if (e && (e->mine == GONE || e->before == '-' || e->listed == now)) continue;
    if (e) e->listed = now;
    result = names_add(all, n->text, n->type, n->inode);
  }
  for (struct entry *e = f ? f->first : NULL; e && result >= 0; e = e->next_in_folder)
    if (e->before && e->before != '-' && !e->mine && e->listed != now) {
      e->listed = now;
      result = names_add(all, e->name, e->before == 'd' ? DT_DIR : e->before == 'l' ? DT_LNK : DT_REG, 1);
    }
  size_t first = all->used;
  for (struct entry *e = f ? f->first : NULL; e && result >= 0; e = e->next_in_folder)
    if ((e->mine == HERE || e->mine == NEW) && e->listed != now) {
      uint64_t inode;
      strcpy(w->walk, config.tree);
      strcat(w->walk, e->path);
      unsigned char type = type_of(w->walk, &inode);
      result = names_add(all, e->name, type, inode);
    }
  names_free(&real);
  return result < 0 ? result : order(all, first);
}

int names_in(const struct place *p, struct names *all)
{
  struct work *w = work_begin();
  signals kept = signals_off();
  tables_look(1);
  int result = config.side == VOICE ? names_of_voice(w, p, all) : names_of_own(w, p, all);
  tables_look(0);
  signals_back(kept);
  work_end(w);
  return result;
}
