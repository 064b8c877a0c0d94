/* How a rank that is not the voice changes files: in its mirror tree, with the errors that one process would get.
 *
 * A file that exists is copied up before it is changed (not if it is truncated anyway); a name that goes is marked as
 * gone; a new folder is NEW and from then on plain, since nothing real is below it. Permission is asked of the real
 * parent, so that what fails for the voice fails here.
 */
#include "files.h"
#include <sys/mman.h>

static int is_own(int state) { return state == THROUGH || state == HERE || state == NEW || state == PURE; }
static int is_plain(int state) { return state == THROUGH || state == PURE; }

static const char *in_mirror(struct work *w, const char *where)
{
  memcpy(w->second, config.tree, config.tree_length);
  strcpy(w->second + config.tree_length, where);
  return w->second;
}

int permit(const char *place, int wanted) { return sys_access(place, wanted, AT_EACCESS); }

/* What the kernel says if this process may not change the names in the folder of ``where``. */
static int permit_names(struct work *w, const char *where)
{
  char *folder = w->text[4];
  struct place *p = &w->b;
  if (!parent_of(where, folder)) strcpy(folder, "/");
  int result = find(w, p, folder, 1);
  if (result < 0) return result;
  if (p->state == ABSENT) return -ENOENT;
  return permit(p->target, W_OK | X_OK);
}

/* The folders of the mirror above ``place`` are made when they are missed. */
static int above_missing(struct work *w, int result, const char *place)
{
  if (result != -ENOENT) return 0;
  char *folder = w->more;
  parent_of(place, folder);
  return sys_make_folders(folder) >= 0;
}
#define MADE(result, w, place, act)                                    \
  do {                                                                 \
    (result) = (act);                                                  \
    if (above_missing(w, (int)(result), place)) (result) = (act);      \
  } while (0)

static int is_database(int fd)
{
  char head[16];
  return raw(SYS_pread64, fd, (long)head, 16, 0, 0, 0) == 16 && !memcmp(head, "SQLite format 3", 16);
}

/* Copy the file or link ``where`` up into the mirror. */
static int lift(struct work *w, const char *where, int empty, int marked)
{
  struct place *p = &w->b;
  struct stat st;
  char *copy = w->text[4];
  strcpy(copy, where);
  int there = settled(w, p, copy, 0, &st);
  if (there <= 0) return there < 0 ? there : -ENOENT;
  int result;
  if (S_ISLNK(st.st_mode)) {
    char *text = w->text[5];
    long n;
    LOOK(n, w, p, copy, 0, sys_readlink(p->target, text, PATH_MAX));
    if (n < 0) return (int)n;
    const char *place = in_mirror(w, copy);
    MADE(result, w, place, sys_symlink(text, place));
  } else {
    int from = -1;
    for (;;) {
      unsigned seen = news_number;
      result = find(w, p, copy, 0);
      from = result < 0 ? result : p->state == ABSENT ? -ENOENT : sys_open(p->target, O_CLOEXEC | O_NOFOLLOW, 0);
      news();
      if (seen == news_number) break;
      if (from >= 0) sys_close(from);
      forget_ways();
    }
    if (from < 0) return from;
    const char *place = in_mirror(w, copy);
    if (!empty && st.st_size > LIMIT && is_database(from))
      result = -EACCES; /* SQLite opens every database to write; a huge one is read-only here, which it understands */
    else {
      MADE(result, w, place, copy_file(from, place, empty));
      if (result == -EEXIST) { /* left of a lift that was killed */
        sys_unlink(place, 0);
        result = copy_file(from, place, empty);
      }
    }
    sys_close(from);
  }
  return result < 0 || !marked ? result : mark(HERE, copy);
}

/* ---- lists of paths, for whole folders ---- */

struct list { char *data; size_t used, room; };

static int list_add(struct list *l, const char *path, const char *name)
{
  size_t need = strlen(path) + strlen(name) + 2;
  if (l->used + need > l->room) {
    size_t room = l->room ? l->room * 2 : 1 << 16;
    while (room < l->used + need) room *= 2;
    char *wider = (char *)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if ((long)wider < 0 && (long)wider > -4096) return -ENOMEM;
    if (l->data) {
      memcpy(wider, l->data, l->used);
      raw(SYS_munmap, (long)l->data, (long)l->room, 0, 0, 0, 0);
    }
    l->data = wider;
    l->room = room;
  }
  char *at = l->data + l->used;
  strcpy(at, path);
  if (*name) strcat(strcat(at, "/"), name);
  l->used += strlen(at) + 1;
  return 0;
}

static void list_free(struct list *l)
{
  if (l->data) raw(SYS_munmap, (long)l->data, (long)l->room, 0, 0, 0, 0);
}

/* Copy a folder with all that this rank finds in it up into the mirror, and mark it ours. */
static int lift_tree(struct work *w, const char *top)
{
  struct list folders = {0};
  int result = list_add(&folders, top, "");
  for (size_t at = 0; result >= 0 && at < folders.used;) {
    char *where = w->text[6];
    strcpy(where, folders.data + at);
    at += strlen(where) + 1;
    struct stat st;
    struct place *p = &w->b;
    int there = settled(w, p, where, 0, &st);
    if (there < 0) {
      result = there;
      break;
    }
    const char *place = in_mirror(w, where);
    result = sys_make_folders(place);
    if (result >= 0 && there) sys_chmod(place, (st.st_mode & 07777) | 0700);
    struct names names = {0};
    if (result >= 0) result = names_in(p, &names);
    size_t i = 0;
    for (struct name *n; result >= 0 && (n = name_at(&names, &i));) {
      char *inner = w->text[7];
      strcpy(inner, where);
      strcat(inner, "/");
      strcat(inner, n->text);
      int is = settled(w, p, inner, 0, &st);
      if (is <= 0 || is_own(p->state)) continue;
      result = S_ISDIR(st.st_mode) ? list_add(&folders, inner, "") : lift(w, inner, 0, 0);
    }
    /* folders of ours further in are in the mirror already, with real ones perhaps beside them */
    names_free(&names);
  }
  list_free(&folders);
  return result < 0 ? result : mark(NEW, top);
}

/* ---- changes ---- */

static void stamp(struct work *w, const char *where)
{
  /* A folder of the file system below shows a change by its time, which we take from the mirror's (calls.c). */
  char *folder = w->text[5];
  parent_of(where, folder);
  const char *place = in_mirror(w, folder);
  if (sys_times(place, NULL, 0) == -ENOENT) sys_make_folders(place);
}

static int forget(struct work *w, const char *where, int was_folder)
{
  struct stat st;
  int result = mark(0, where);
  forget_ways();
  if (result >= 0 && settled(w, &w->b, where, 0, &st) == 1) {
    result = mark(GONE, where);
    stamp(w, where);
  }
  if (was_folder) { /* the mirror's empty shells */
    struct list folders = {0};
    list_add(&folders, in_mirror(w, where), "");
    for (size_t at = 0; at < folders.used;) {
      char *path = w->text[5];
      strcpy(path, folders.data + at);
      at += strlen(path) + 1;
      struct names names = {0};
      w->b.state = PURE;
      w->b.where[0] = 0;
      strcpy(w->b.target, path);
      names_in(&w->b, &names);
      size_t i = 0;
      for (struct name *n; (n = name_at(&names, &i));)
        if (n->type == DT_DIR) list_add(&folders, path, n->text);
      names_free(&names);
    }
    for (size_t end = folders.used; end > 0;) {
      size_t start = end - 1;
      while (start > 0 && folders.data[start - 1]) start--;
      sys_unlink(folders.data + start, AT_REMOVEDIR);
      end = start;
    }
    list_free(&folders);
  }
  return result;
}

int own_open(struct work *w, const char *path, int flags, mode_t mode)
{
  int exclusive = (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL);
  struct place *p = &w->a;
  struct stat st;
  signals kept;
  int result = NOW_VOICE;
  if (gate_enter(&kept)) {
    int there = settled(w, p, path, !(exclusive || flags & O_NOFOLLOW), &st);
    if (there < 0)
      result = there;
    else if ((flags & O_TMPFILE) == O_TMPFILE) /* a file without a name, in the folder ``path`` */
      result = there ? sys_open(is_plain(p->state) ? p->target : config.root, flags, mode) : -ENOENT;
    else if (p->state == THROUGH || (there && !S_ISREG(st.st_mode))) { /* devices and pipes may wait: no gate */
      gate_leave(&kept);
      return there && exclusive ? -EEXIST : sys_open(p->target, flags, mode);
    } else if (is_own(p->state))
      result = sys_open(p->target, flags, mode);
    else if (!there && !(flags & O_CREAT))
      result = -ENOENT;
    else if (there && exclusive)
      result = -EEXIST;
    else if (!there) {
      result = permit_names(w, p->where);
      if (result >= 0) {
        const char *place = in_mirror(w, p->where);
        MADE(result, w, place, sys_open(place, flags, mode));
        if (result >= 0) {
          int noted = mark(HERE, p->where);
          if (noted < 0) {
            sys_close(result);
            result = noted;
          }
        }
      }
    } else if ((flags & O_ACCMODE) == O_RDONLY && !(flags & O_TRUNC))
      result = sys_open(p->target, flags, mode);
    else {
      result = permit(p->target, W_OK | ((flags & O_ACCMODE) == O_RDWR ? R_OK : 0));
      if (result >= 0) result = lift(w, p->where, flags & O_TRUNC, 1);
      if (result >= 0) result = sys_open(in_mirror(w, p->where), flags, mode);
    }
  }
  gate_leave(&kept);
  return result;
}

int own_mkdir(struct work *w, const char *path, mode_t mode)
{
  struct place *p = &w->a;
  struct stat st;
  signals kept;
  int result = NOW_VOICE;
  char *name = w->link; /* "folder/" names the folder that is to be */
  strcpy(name, path);
  for (size_t n = strlen(name); n > 1 && name[n - 1] == '/';) name[--n] = 0;
  char *copy = w->second;
  strcpy(copy, name);
  if (gate_enter(&kept)) {
    int there = settled(w, p, copy, 0, &st);
    if (there < 0)
      result = there;
    else if (is_plain(p->state))
      result = sys_mkdir(p->target, mode);
    else if (there)
      result = -EEXIST;
    else {
      result = permit_names(w, p->where);
      if (result >= 0) {
        const char *place = in_mirror(w, p->where);
        MADE(result, w, place, sys_mkdir(place, mode));
        if (result == -EEXIST) result = 0; /* a shell that was left */
        if (result >= 0) result = mark(NEW, p->where);
      }
    }
  }
  gate_leave(&kept);
  return result;
}

int own_remove(struct work *w, const char *path, int folder)
{
  struct place *p = &w->a;
  struct stat st;
  signals kept;
  int result = NOW_VOICE;
  if (gate_enter(&kept)) {
    int there = settled(w, p, path, 0, &st);
    size_t n = strlen(p->target);
    if (there > 0 && n > 1 && p->target[n - 1] == '/') p->target[n - 1] = 0;
    if (there <= 0)
      result = there < 0 ? there : -ENOENT;
    else if (is_plain(p->state))
      result = sys_unlink(p->target, folder ? AT_REMOVEDIR : 0);
    else if (folder != (S_ISDIR(st.st_mode) != 0))
      result = folder ? -ENOTDIR : -EISDIR;
    else {
      result = permit_names(w, p->where);
      if (result >= 0 && is_own(p->state))
        result = sys_unlink(p->target, folder ? AT_REMOVEDIR : 0);
      else if (result >= 0 && folder) {
        struct names names = {0};
        result = names_in(p, &names);
        if (result >= 0 && names.count) result = -ENOTEMPTY;
        names_free(&names);
      }
      if (result >= 0) {
        char *where = w->first;
        strcpy(where, p->where);
        result = forget(w, where, folder);
      }
    }
    if (result >= 0) forget_ways();
  }
  gate_leave(&kept);
  return result;
}

static int move(const char *from, const char *to)
{
  int result = sys_rename(from, to, 0);
  if (result != -EXDEV) return result;
  int fd = sys_open(from, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return fd;
  sys_unlink(to, 0);
  result = copy_file(fd, to, 0);
  sys_close(fd);
  return result < 0 ? result : sys_unlink(from, 0);
}

int own_rename(struct work *w, const char *from, const char *to, unsigned flags)
{
  struct stat was, is;
  signals kept;
  int result = NOW_VOICE;
  char *old = w->text[0], *new = w->text[1], *old_at = w->text[2], *new_at = w->text[3];
  if (gate_enter(&kept)) {
    struct place *p = &w->a;
    int there = settled(w, p, from, 0, &was), old_state = p->state, new_state, present;
    strcpy(old, p->where);
    strcpy(old_at, p->target);
    present = there < 0 ? 0 : settled(w, p, to, 0, &is);
    new_state = p->state;
    strcpy(new, p->where);
    strcpy(new_at, p->target);
    for (char *at = old_at; at; at = at == old_at ? new_at : NULL) { /* "folder/" */
      size_t n = strlen(at);
      if (n > 1 && at[n - 1] == '/') at[n - 1] = 0;
    }
    int folder = there > 0 && S_ISDIR(was.st_mode);
    size_t length = strlen(old);
    if (there <= 0)
      result = there < 0 ? there : -ENOENT;
    else if (present < 0)
      result = present;
    else if (flags & ~(unsigned)RENAME_NOREPLACE)
      result = -EINVAL; /* programs that can exchange names fall back to other ways */
    else if (flags && present)
      result = -EEXIST;
    else if (!strcmp(old, new))
      result = 0;
    else if (folder && !strncmp(new, old, length) && new[length] == '/')
      result = -EINVAL;
    else {
      result = 0;
      if (present && (new_state == LOWER || new_state == KEPT)) { /* the mirror cannot tell, so we do */
        if ((S_ISDIR(is.st_mode) != 0) != folder)
          result = folder ? -ENOTDIR : -EISDIR;
        else if (folder) {
          struct names names = {0};
          result = names_in(p, &names);
          if (result >= 0 && names.count) result = -ENOTEMPTY;
          names_free(&names);
        }
      }
      if (result >= 0 && !is_plain(old_state)) result = permit_names(w, old);
      if (result >= 0 && !is_plain(new_state)) result = permit_names(w, new);
      if (result >= 0 && (old_state == LOWER || old_state == KEPT)) {
        result = folder ? lift_tree(w, old) : lift(w, old, 0, 1);
        strcpy(old_at, in_mirror(w, old));
      }
      if (result >= 0) {
        if (new_state == LOWER || new_state == KEPT || new_state == ABSENT) strcpy(new_at, in_mirror(w, new));
        MADE(result, w, new_at, move(old_at, new_at));
      }
      if (result >= 0 && !is_plain(new_state)) result = mark(folder ? NEW : HERE, new);
      if (result >= 0 && !is_plain(old_state)) result = forget(w, old, 0);
      forget_ways();
    }
  }
  gate_leave(&kept);
  return result;
}

/* Something new stands at ``path``: made by ``make`` in the mirror. */
static int appear(struct work *w, const char *path, int (*make)(const char *, const void *), const void *what)
{
  struct place *p = &w->a;
  struct stat st;
  int there = settled(w, p, path, 0, &st);
  if (there < 0) return there;
  if (is_plain(p->state)) return make(p->target, what);
  if (there) return -EEXIST;
  int result = permit_names(w, p->where);
  if (result < 0) return result;
  const char *place = in_mirror(w, p->where);
  MADE(result, w, place, make(place, what));
  if (result >= 0) result = mark(HERE, p->where);
  forget_ways();
  return result;
}

static int make_link(const char *place, const void *source) { return sys_link(source, place, 0); }
static int make_followed(const char *place, const void *source) { return sys_link(source, place, AT_SYMLINK_FOLLOW); }
static int make_symlink(const char *place, const void *text) { return sys_symlink(text, place); }
struct node { mode_t mode; dev_t device; };
static int make_node(const char *place, const void *what)
{
  const struct node *n = what;
  return (int)raw(SYS_mknodat, AT_FDCWD, (long)place, n->mode, (long)n->device, 0, 0);
}

int own_link(struct work *w, const char *from, const char *to, int follow)
{
  signals kept;
  int result = NOW_VOICE;
  char *source = w->text[0], *target = w->text[1];
  strcpy(target, to);
  if (gate_enter(&kept)) {
    result = own_ready(w, from, follow, 0);
    if (result >= 0) {
      strcpy(source, w->a.target);
      result = appear(w, target, follow && w->a.state == THROUGH ? make_followed : make_link, source);
    }
  }
  gate_leave(&kept);
  return result;
}

int own_symlink(struct work *w, const char *text, const char *path)
{
  signals kept;
  int result = gate_enter(&kept) ? appear(w, path, make_symlink, text) : NOW_VOICE;
  gate_leave(&kept);
  return result;
}

int own_node(struct work *w, const char *path, mode_t mode, dev_t device)
{
  signals kept;
  struct node node = {mode, device};
  int result = gate_enter(&kept) ? appear(w, path, make_node, &node) : NOW_VOICE;
  gate_leave(&kept);
  return result;
}

/* Make ``path`` one of ours, so that w->a.target can be changed; the gate is held. ``write``: it must be writable,
 * else it must be owned. Mode and times of folders that were there before the run change in a stand-in. */
int own_ready(struct work *w, const char *path, int follow, int write)
{
  struct place *p = &w->a;
  struct stat st;
  int there = settled(w, p, path, follow, &st);
  if (there <= 0) return there < 0 ? there : -ENOENT;
  if (is_own(p->state)) return 0;
  int result = 0;
  uid_t me = (uid_t)raw(SYS_geteuid, 0, 0, 0, 0, 0, 0);
  if (!write && st.st_uid != me && me != 0) return -EPERM;
  if (S_ISDIR(st.st_mode)) {
    if (write) return 0; /* the kernel says what is wrong */
    strcpy(p->target, config.root);
    strcat(p->target, "/folder");
    result = sys_mkdir(p->target, 0700);
    return result == -EEXIST ? 0 : result;
  }
  if (!S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode)) return 0;
  if (write) result = permit(p->target, W_OK);
  char *where = w->first;
  strcpy(where, p->where);
  if (result >= 0) result = lift(w, where, 0, 1);
  if (result >= 0) {
    strcpy(p->target, in_mirror(w, where));
    p->state = HERE;
  }
  return result;
}
