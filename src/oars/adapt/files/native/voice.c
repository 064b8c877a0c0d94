/* The voice's side: before it changes a path for the first time, it writes down what the path was.
 *
 * One line per path goes into the ledger before the change; the original is kept as <shared>/kept/<name> (a file, an
 * empty folder with the same mode, or a symbolic link). The other ranks put these originals over what they find.
 *
 * A kept file is a hard link to the old inode where possible, and the voice goes on with a fresh inode in its place:
 * nothing is copied for open(path, "w"), and a slower rank that has the old file open reads on undisturbed. On another
 * file system than the shared folder's the original is copied. Files of other owners or with several names are copied
 * and changed in place, their name ends in '~'; above LIMIT bytes a file that would have to be copied is changed
 * without being kept.
 */
#include "files.h"
#include <sys/mman.h>

static volatile unsigned number;

static void decimal(char *out, unsigned long n)
{
  char digits[24];
  int i = 0;
  do digits[i++] = (char)('0' + n % 10); while (n /= 10);
  while (i) *out++ = digits[--i];
  *out = 0;
}

static void new_name(char *out) /* 64 + 50 bytes */
{
  strcpy(out, config.token);
  strcat(out, "-");
  decimal(out + strlen(out), (unsigned long)raw(SYS_getpid, 0, 0, 0, 0, 0, 0));
  strcat(out, "-");
  decimal(out + strlen(out), __sync_fetch_and_add(&number, 1));
}

static int may_change_names(struct work *w, const char *where)
{
  if (!parent_of(where, w->text[7])) strcpy(w->text[7], "/");
  return permit(w->text[7], W_OK | X_OK) == 0;
}

static int known(const char *where)
{
  signals kept = signals_off();
  tables_look(1);
  const struct entry *e = entry_of(where);
  int result = e && e->before;
  tables_look(0);
  signals_back(kept);
  return result;
}

/* The canonical name of ``path``; NULL if it is not watched. */
static const char *canonical(struct work *w, const char *path, int follow)
{
  struct place *p = &w->a;
  if (find(w, p, path, follow) < 0 || p->state == THROUGH || !strcmp(p->where, "/")) return NULL;
  return p->where;
}

static int lookup(const char *where, struct stat *st) { return sys_stat(where, st, AT_SYMLINK_NOFOLLOW) == 0; }

/* Whether an original in kept/ has this inode: then it must not be written to. */
static int is_kept(const struct stat *st)
{
  if (st->st_nlink < 2) return 0;
  struct work *w = work_begin();
  struct names names = {0};
  w->b.state = THROUGH;
  strcpy(w->b.where, config.kept);
  strcpy(w->b.target, config.kept);
  int found = 0;
  if (names_in(&w->b, &names) >= 0) {
    size_t at = 0;
    for (struct name *n; !found && (n = name_at(&names, &at));) {
      struct stat other;
      if (n->inode != st->st_ino) continue;
      strcpy(w->text[0], config.kept);
      strcat(w->text[0], "/");
      strcat(w->text[0], n->text);
      found = lookup(w->text[0], &other) && other.st_dev == st->st_dev;
    }
  }
  names_free(&names);
  work_end(w);
  return found;
}

static int copy_to(const char *where, const char *to, int empty)
{
  int from = sys_open(where, O_RDONLY | O_CLOEXEC, 0);
  if (from < 0) return from;
  int result = copy_file(from, to, empty);
  sys_close(from);
  return result;
}

/* Put what stands at ``where`` into kept/, and write it down; -1: we will not. */
static int keep(struct work *w, const char *where, const struct stat *was, int in_place)
{
  char name[130], *kept = w->text[6];
  int result;
  unsigned char what;
  for (int tries = 0;; tries++) { /* a name may be there already: process ids come again */
    new_name(name);
    if (in_place) strcat(name, "~");
    if (S_ISDIR(was->st_mode)) { /* its number, for processes that have it open */
      strcat(name, "-i");
      decimal(name + strlen(name), was->st_ino);
    }
    strcpy(kept, config.kept);
    strcat(kept, "/");
    strcat(kept, name);
    if (S_ISDIR(was->st_mode)) {
      what = 'd';
      struct timespec times[2] = {was->st_atim, was->st_mtim};
      result = sys_mkdir(kept, 0700);
      if (result >= 0) sys_chmod(kept, was->st_mode & 07777), sys_times(kept, times, 0);
    } else if (S_ISLNK(was->st_mode)) {
      what = 'l';
      long n = sys_readlink(where, w->text[5], PATH_MAX);
      result = n < 0 ? (int)n : sys_symlink(w->text[5], kept);
    } else if (!S_ISREG(was->st_mode))
      return -1;
    else {
      what = 'f';
      result = in_place ? -EXDEV : sys_link(where, kept, 0);
      if (result < 0 && result != -EEXIST) { /* another file system, or one without links */
        if (was->st_size > LIMIT) return -1;
        result = copy_to(where, kept, 0);
      }
    }
    if (result != -EEXIST || tries > 1000) break;
  }
  return result < 0 ? -1 : note_before(what, name, where);
}

static void keep_name(struct work *w, const char *where, const struct stat *was)
{
  if (!known(where)) keep(w, where, was, 0);
}

static void beside(char *out, const char *where)
{
  char name[130];
  new_name(name);
  size_t cut = (size_t)(strrchr(where, '/') - where) + 1;
  memcpy(out, where, cut);
  out[cut] = '.';
  strncpy(out + cut + 1, where + cut, 150);
  out[cut + 151] = 0;
  strcat(out, ".oars-");
  strcat(out, name);
}

/* The contents of ``path`` change next. ``empty``: its old contents are thrown away first. */
void voice_writing(struct work *w, const char *path, int empty, int create, int exclusive, int append)
{
  const char *found = canonical(w, path, !exclusive);
  struct stat was;
  if (!found) return;
  char *where = w->text[0];
  strcpy(where, found);
  int there = lookup(where, &was);
  if (append && (create || there)) {
    char length[24];
    decimal(length, there ? (unsigned long)was.st_size : 0);
    note_before('a', length, where);
  }
  if (!there) {
    if (create) note_before('-', NULL, where);
    return;
  }
  if (!S_ISREG(was.st_mode) || exclusive) return;
  int was_known = known(where);
  if (was_known && !is_kept(&was)) return;
  if (permit(where, W_OK) < 0) return;
  /* Give the writer a fresh inode where we can. */
  int swap = (was.st_nlink == 1 || was_known) && was.st_uid == (uid_t)raw(SYS_geteuid, 0, 0, 0, 0, 0, 0) &&
             may_change_names(w, where) && (empty || was.st_size <= LIMIT);
  if (!was_known && keep(w, where, &was, !swap) < 0) return;
  if (!swap) return;
  char *fresh = w->text[1];
  beside(fresh, where);
  note_before('-', NULL, fresh);
  if (copy_to(where, fresh, empty) < 0) return;
  if (was.st_gid != (gid_t)raw(SYS_getegid, 0, 0, 0, 0, 0, 0)) {
    sys_chown(fresh, (uid_t)-1, was.st_gid, 0);
    sys_chmod(fresh, was.st_mode & 07777);
  }
  if (sys_rename(fresh, where, 0) < 0) sys_unlink(fresh, 0);
}

/* Something that is not there yet (a folder, a link) appears at ``path`` next. */
void voice_making(struct work *w, const char *path)
{
  struct stat was;
  char *name = w->text[1];
  strcpy(name, path);
  for (size_t n = strlen(name); n > 1 && name[n - 1] == '/';) name[--n] = 0;
  const char *where = canonical(w, name, 0);
  if (where && !lookup(where, &was) && may_change_names(w, where)) note_before('-', NULL, where);
}

/* The name ``path`` goes next: a file, a link or an empty folder. */
void voice_removing(struct work *w, const char *path)
{
  struct stat was;
  const char *where = canonical(w, path, 0);
  if (!where || !lookup(where, &was) || !may_change_names(w, where)) return;
  if (S_ISDIR(was.st_mode)) {
    struct names names = {0};
    int result = names_in(&w->a, &names);
    size_t count = names.count;
    names_free(&names);
    if (result < 0 || count) return; /* it stays */
  }
  keep_name(w, where, &was);
  forget_ways();
}

/* All that is in a folder and its folders, each before what is in it. */
static int tree_below(struct work *w, const char *top, struct names *all)
{
  int result = names_add(all, top, DT_DIR, 0);
  for (size_t at = 0; result >= 0;) {
    struct name *n = name_at(all, &at);
    if (!n) break;
    if (n->type != DT_DIR) continue;
    struct place *p = &w->b;
    p->state = THROUGH;
    strcpy(p->where, n->text);
    strcpy(p->target, n->text);
    struct names inner = {0};
    if (names_in(p, &inner) >= 0) {
      size_t i = 0;
      for (struct name *m; result >= 0 && (m = name_at(&inner, &i));) {
        struct stat st;
        strcpy(w->text[4], p->target);
        strcat(w->text[4], "/");
        strcat(w->text[4], m->text);
        if (lookup(w->text[4], &st)) result = names_add(all, w->text[4], IFTODT(st.st_mode), 0);
      }
    }
    names_free(&inner);
  }
  return result;
}

static void keep_tree(struct work *w, const char *top)
{
  struct names all = {0};
  struct stat was;
  if (tree_below(w, top, &all) >= 0) {
    size_t room = (all.count + 1) * sizeof(char *), n = 0, at = 0;
    const char **each = (const char **)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!((long)each < 0 && (long)each > -4096)) {
      for (struct name *one; (one = name_at(&all, &at));) each[n++] = one->text;
      while (n--) /* what is in a folder before the folder */
        if (!known(each[n]) && lookup(each[n], &was)) keep_name(w, each[n], &was);
      raw(SYS_munmap, (long)each, (long)room, 0, 0, 0, 0);
    }
  }
  names_free(&all);
}

void voice_renaming(struct work *w, const char *from, const char *to)
{
  struct stat was, there;
  char *old = w->text[2], *new = w->text[3];
  const char *found = canonical(w, to, 0);
  int to_watched = found && may_change_names(w, found);
  if (to_watched) strcpy(new, found);
  found = canonical(w, from, 0);
  int exists = find(w, &w->a, from, 0) >= 0 && lookup(w->a.target, &was);
  char *source = w->text[1];
  strcpy(source, w->a.target);
  if (!exists) return;
  if (found && may_change_names(w, found)) {
    strcpy(old, found);
    if (!known(old)) {
      if (S_ISDIR(was.st_mode))
        keep_tree(w, old);
      else
        keep_name(w, old, &was);
    }
  }
  if (to_watched) {
    int present = lookup(new, &there);
    if (!present)
      note_before('-', NULL, new);
    else if (!S_ISDIR(there.st_mode) || S_ISDIR(was.st_mode))
      keep_name(w, new, &there);
    if (S_ISDIR(was.st_mode) && (!present || S_ISDIR(there.st_mode))) {
      struct names all = {0};
      size_t at = 0, cut = strlen(source);
      if (tree_below(w, source, &all) >= 0)
        for (struct name *n; (n = name_at(&all, &at));)
          if (strlen(n->text) > cut) {
            strcpy(w->text[4], new);
            strcat(w->text[4], n->text + cut);
            note_before('-', NULL, w->text[4]);
          }
      names_free(&all);
    }
  }
  forget_ways();
}

/* ``where`` changes next, without a new inode if ``in_place``: for a rank that is about to be the voice. */
int voice_promise(struct work *w, const char *where, int in_place)
{
  struct stat was;
  if (known(where)) return 0;
  if (!lookup(where, &was)) return note_before('-', NULL, where);
  keep(w, where, &was, in_place);
  return 0;
}
