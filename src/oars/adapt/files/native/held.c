/* What this process holds open in its mirror (a log, a database, a mapped array) goes on at the real place when its
 * rank has become the voice.
 *
 * Where the mirror's file became real by a hard link it is the same inode, and there is nothing to do. Where it was
 * copied, descriptors are replaced by ones of the real file with the same flags and offset, and shared mappings are
 * laid anew over the same addresses. The working folder moves too. Such a file keeps the number by which the process
 * knows it: SQLite takes a database whose number has changed for another file. Files without a name any more are left
 * as they are.
 */
#include "files.h"
#include <sys/mman.h>

static struct { dev_t device, known_device; ino_t inode, known_inode; } renumbered[256];
static volatile unsigned renumbered_count;

/* The numbers by which this process knows a file. */
void known_as(dev_t *device, ino_t *inode)
{
  for (unsigned i = 0; i < renumbered_count; i++)
    if (renumbered[i].inode == *inode && renumbered[i].device == *device) {
      *device = renumbered[i].known_device;
      *inode = renumbered[i].known_inode;
      return;
    }
}

static void renumber(const struct stat *now, const struct stat *known)
{
  unsigned i = renumbered_count;
  if (i >= sizeof renumbered / sizeof *renumbered) return;
  renumbered[i].device = now->st_dev;
  renumbered[i].inode = now->st_ino;
  renumbered[i].known_device = known->st_dev;
  renumbered[i].known_inode = known->st_ino;
  renumbered_count = i + 1;
}

/* Whether what stands at ``mirror``'s real place is a copy of it. */
static int copied(const char *mirror, const char *place)
{
  struct stat one, other;
  if (sys_stat(mirror, &one, AT_SYMLINK_NOFOLLOW) < 0 || sys_stat(place, &other, 0) < 0) return 0;
  return one.st_dev != other.st_dev || one.st_ino != other.st_ino;
}

/* Add what another thread or process has written at the end of the mirror's file since it was copied. */
static void catch_up(const char *mirror, const char *place)
{
  struct stat one, other;
  if (sys_stat(mirror, &one, AT_SYMLINK_NOFOLLOW) < 0 || sys_stat(place, &other, 0) < 0) return;
  if (!S_ISREG(one.st_mode) || one.st_size <= other.st_size) return;
  int from = sys_open(mirror, O_RDONLY | O_CLOEXEC, 0), to = sys_open(place, O_WRONLY | O_CLOEXEC, 0);
  if (from >= 0 && to >= 0) {
    raw(SYS_lseek, from, other.st_size, SEEK_SET, 0, 0, 0);
    raw(SYS_lseek, to, 0, SEEK_END, 0, 0, 0);
    copy_contents(from, to);
  }
  if (from >= 0) sys_close(from);
  if (to >= 0) sys_close(to);
}

/* Whether two descriptors of one file are duplicates: then moving one moves the other. */
static int share(int one, int other)
{
  long at = raw(SYS_lseek, one, 0, SEEK_CUR, 0, 0, 0);
  if (at < 0 || raw(SYS_lseek, other, 0, SEEK_CUR, 0, 0, 0) != at) return 0;
  raw(SYS_lseek, one, at + 1, SEEK_SET, 0, 0, 0);
  int result = raw(SYS_lseek, other, 0, SEEK_CUR, 0, 0, 0) == at + 1;
  raw(SYS_lseek, one, at, SEEK_SET, 0, 0, 0);
  return result;
}

static void put_over(int new, int fd)
{
  long inherited = raw(SYS_fcntl, fd, F_GETFD, 0, 0, 0, 0);
  raw(SYS_dup3, new, fd, inherited & FD_CLOEXEC ? O_CLOEXEC : 0, 0, 0, 0);
}

static int number_in(const char *text)
{
  int n = 0;
  if (!*text) return -1;
  for (; *text; text++) {
    if (*text < '0' || *text > '9') return -1;
    n = n * 10 + (*text - '0');
  }
  return n;
}

static void follow_descriptors(struct work *w)
{
  struct names names = {0};
  w->a.state = THROUGH;
  strcpy(w->a.where, "/proc/self/fd");
  strcpy(w->a.target, "/proc/self/fd");
  if (names_in(&w->a, &names) < 0) return;
  int moved[256], to[256], count = 0; /* so that duplicates stay duplicates */
  size_t at = 0;
  for (struct name *n; (n = name_at(&names, &at));) {
    int fd = number_in(n->text);
    char *mirror = w->first, *link = w->text[0];
    strcpy(link, "/proc/self/fd/");
    strcat(link, n->text);
    if (fd < 0 || sys_readlink(link, mirror, BIG) < 0) continue;
    if (strncmp(mirror, config.tree, config.tree_length) || mirror[config.tree_length] != '/') continue;
    struct stat open_one, there;
    if (raw(SYS_fstat, fd, (long)&open_one, 0, 0, 0, 0) < 0) continue;
    if (sys_stat(mirror, &there, AT_SYMLINK_NOFOLLOW) < 0) continue;
    if (open_one.st_ino != there.st_ino || open_one.st_dev != there.st_dev) continue;
    const char *place = mirror + config.tree_length;
    if (!copied(mirror, place)) continue;
    catch_up(mirror, place);
    int twin = -1;
    for (int i = 0; i < count && twin < 0; i++)
      if (share(moved[i], fd)) twin = to[i];
    if (twin < 0) {
      int flags = (int)raw(SYS_fcntl, fd, F_GETFL, 0, 0, 0, 0) & ~(O_CREAT | O_EXCL | O_TRUNC);
      twin = sys_open(place, flags | O_CLOEXEC, 0);
      if (twin == -EACCES && sys_stat(place, &there, 0) == 0) { /* made read-only after it was opened */
        sys_chmod(place, (there.st_mode & 07777) | 0600);
        twin = sys_open(place, flags | O_CLOEXEC, 0);
        sys_chmod(place, there.st_mode & 07777);
      }
      if (twin < 0) continue;
      raw(SYS_lseek, twin, raw(SYS_lseek, fd, 0, SEEK_CUR, 0, 0, 0), SEEK_SET, 0, 0, 0);
      if (raw(SYS_fstat, twin, (long)&there, 0, 0, 0, 0) == 0) renumber(&there, &open_one);
    }
    catch_up(mirror, place);
    if (count < 256) { /* the old description, by which later duplicates are known */
      moved[count] = (int)raw(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 0, 0, 0, 0);
      to[count++] = twin;
    }
    put_over(twin, fd);
  }
  for (int i = 0; i < count; i++) {
    sys_close(moved[i]);
    int again = 0;
    for (int j = 0; j < i; j++) again |= to[j] == to[i];
    if (!again) sys_close(to[i]);
  }
  names_free(&names);
}

static unsigned long hex(char **text)
{
  unsigned long n = 0;
  for (;; (*text)++) {
    char c = **text;
    if (c >= '0' && c <= '9') n = n << 4 | (unsigned long)(c - '0');
    else if (c >= 'a' && c <= 'f') n = n << 4 | (unsigned long)(c - 'a' + 10);
    else return n;
  }
}

static void map_again(char *line)
{
  unsigned long start = hex(&line);
  line++;
  unsigned long end = hex(&line);
  char *how = ++line;
  line += 5;
  unsigned long offset = hex(&line);
  char *path = strchr(line, '/');
  if (!path || how[3] != 's') return;
  if (strncmp(path, config.tree, config.tree_length) || path[config.tree_length] != '/') return;
  const char *place = path + config.tree_length;
  if (!copied(path, place)) return;
  catch_up(path, place);
  int fd = sys_open(place, (how[1] == 'w' ? O_RDWR : O_RDONLY) | O_CLOEXEC, 0);
  if (fd < 0) return;
  int protection = (how[0] == 'r' ? PROT_READ : 0) | (how[1] == 'w' ? PROT_WRITE : 0) | (how[2] == 'x' ? PROT_EXEC : 0);
  raw(SYS_mmap, (long)start, (long)(end - start), protection, MAP_SHARED | MAP_FIXED, fd, (long)offset);
  sys_close(fd);
}

static void follow_mappings(void)
{
  size_t room = 8 << 20, n = 0;
  char *text = (char *)raw(SYS_mmap, 0, (long)room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if ((long)text < 0 && (long)text > -4096) return;
  int fd = sys_open("/proc/self/maps", O_RDONLY | O_CLOEXEC, 0);
  long got;
  while (fd >= 0 && n < room - 1 && (got = raw(SYS_read, fd, (long)text + (long)n, (long)(room - 1 - n), 0, 0, 0)) > 0)
    n += (size_t)got;
  if (fd >= 0) sys_close(fd);
  for (char *line = text; *line;) {
    char *end = strchrnul(line, '\n');
    int last = !*end;
    *end = 0;
    map_again(line);
    line = last ? end : end + 1;
  }
  raw(SYS_munmap, (long)text, (long)room, 0, 0, 0, 0);
}

void held_follow(void)
{
  struct work *w = work_begin();
  follow_mappings(); /* first: the descriptors may be the only ones that are still at the old place */
  follow_descriptors(w);
  if (sys_readlink("/proc/self/cwd", w->first, BIG) >= 0 && !strncmp(w->first, config.tree, config.tree_length) &&
      w->first[config.tree_length] == '/')
    raw(SYS_chdir, (long)(w->first + config.tree_length), 0, 0, 0, 0, 0);
  work_end(w);
}
