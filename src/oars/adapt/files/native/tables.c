/* What is known of paths that somebody has changed, and the two logs by which processes share it.
 *
 * The ledger is the voice's: before it changes a path for the first time it writes down what was there. The other
 * ranks follow it. The journal is one rank's own, for its children: what this rank has made or removed in its view.
 *
 * A log is a file of lines that only grows: "TAG [KEPT] PATH;". Each is one write to an O_APPEND descriptor that
 * begins with a line end, so lines of several processes never mix, and a line cut short by a death has no ';' and
 * counts as not written: the change that it announces had not begun.
 *
 *   ledger:   - PATH        nothing was there              ! TOKEN   another rank speaks from here on
 *             a LENGTH PATH   the run appends to this file, which was as long before
 *             f KEPT PATH   a file, kept as kept/KEPT      (d a folder, l a symbolic link)
 *   journal:  H PATH, N PATH, G PATH   a file or link of ours, a folder of ours, removed      F PATH   none of these
 *             V                        this rank has become the voice
 */
#include "files.h"
#include <signal.h>
#include <sys/statfs.h>

struct config config;
__thread int plain_mode;
__thread long changes_made;
volatile unsigned news_number;

struct log { int fd; off_t end; int nfs; char path[PATH_MAX]; };
static struct log ledger = {.fd = -1}, journal = {.fd = -1};
static char speaker[64];
static lock table_lock;

static struct entry **entries;
static struct folder **folders;
static uint32_t entry_slots, entry_count, folder_slots, folder_count;
static char incoming[1 << 18]; /* guarded by table_lock */

/* ---- the table ---- */

static uint32_t hash_of(const char *text, size_t length)
{
  uint32_t h = 2166136261u;
  for (size_t i = 0; i < length; i++) h = (h ^ (unsigned char)text[i]) * 16777619u;
  return h;
}

static char *keep_text(const char *text, size_t length)
{
  char *copy = arena(length + 1);
  memcpy(copy, text, length);
  copy[length] = 0;
  return copy;
}

struct folder *folder_of(const char *path)
{
  if (!folder_slots) return NULL;
  for (struct folder *f = folders[hash_of(path, strlen(path)) % folder_slots]; f; f = f->next)
    if (!strcmp(f->path, path)) return f;
  return NULL;
}

static struct folder *folder_made(const char *path)
{
  struct folder *f = folder_of(path);
  if (f) return f;
  if (folder_count >= folder_slots) {
    uint32_t slots = folder_slots ? folder_slots * 4 : 256;
    struct folder **wider = arena(slots * sizeof *wider);
    memset(wider, 0, slots * sizeof *wider);
    for (uint32_t i = 0; i < folder_slots; i++)
      for (struct folder *g = folders[i], *next; g; g = next) {
        uint32_t slot = hash_of(g->path, strlen(g->path)) % slots;
        next = g->next;
        g->next = wider[slot];
        wider[slot] = g;
      }
    folders = wider;
    folder_slots = slots;
  }
  f = arena(sizeof *f);
  memset(f, 0, sizeof *f);
  f->path = keep_text(path, strlen(path));
  uint32_t slot = hash_of(path, strlen(path)) % folder_slots;
  f->next = folders[slot];
  folders[slot] = f;
  folder_count++;
  return f;
}

struct entry *entry_of(const char *path)
{
  if (!entry_count) return NULL;
  uint32_t h = hash_of(path, strlen(path));
  for (struct entry *e = entries[h % entry_slots]; e; e = e->next)
    if (e->hash == h && !strcmp(e->path, path)) return e;
  return NULL;
}

static struct entry *entry_made(const char *path)
{
  struct entry *e = entry_of(path);
  if (e) return e;
  if (entry_count >= entry_slots) {
    uint32_t slots = entry_slots ? entry_slots * 4 : 1024;
    struct entry **wider = arena(slots * sizeof *wider);
    memset(wider, 0, slots * sizeof *wider);
    for (uint32_t i = 0; i < entry_slots; i++)
      for (struct entry *g = entries[i], *next; g; g = next) {
        next = g->next;
        g->next = wider[g->hash % slots];
        wider[g->hash % slots] = g;
      }
    entries = wider;
    entry_slots = slots;
  }
  e = arena(sizeof *e);
  memset(e, 0, sizeof *e);
  size_t length = strlen(path);
  e->path = keep_text(path, length);
  e->hash = hash_of(path, length);
  const char *slash = strrchr(e->path, '/');
  e->name = slash ? slash + 1 : e->path;
  e->next = entries[e->hash % entry_slots];
  entries[e->hash % entry_slots] = e;
  entry_count++;
  static char parent[BIG]; /* guarded by table_lock */
  size_t cut = slash ? (size_t)(slash - e->path) : 0;
  memcpy(parent, path, cut);
  parent[cut] = 0;
  struct folder *f = folder_made(parent);
  e->next_in_folder = f->first;
  f->first = e;
  return e;
}

static void set_mine(const char *path, int state)
{
  struct entry *e = entry_made(path);
  if (!e->mine != !state) {
    static char parent[BIG]; /* guarded by table_lock */
    parent_of(path, parent);
    folder_made(parent)->mine += state ? 1 : -1;
  }
  e->mine = (unsigned char)state;
}

/* ---- logs ---- */

static int log_open(struct log *l, const char *folder, const char *name)
{
  size_t length = strlen(folder);
  memcpy(l->path, folder, length);
  strcpy(l->path + length, name);
  int fd = sys_open(l->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return fd;
  int high = (int)raw(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 900, 0, 0, 0); /* out of the way of the script's own numbers */
  if (high >= 0) {
    sys_close(fd);
    fd = high;
  }
  l->fd = fd;
  l->end = 0;
  struct statfs kind;
  l->nfs = raw(SYS_fstatfs, fd, (long)&kind, 0, 0, 0, 0) == 0 && kind.f_type == 0x6969;
  return 0;
}

static int grew(struct log *l)
{
  if (l->nfs) { /* clients trust cached sizes for seconds; opening a file asks the server */
    int fd = sys_open(l->path, O_RDONLY | O_CLOEXEC, 0);
    if (fd >= 0) sys_close(fd);
  }
  return raw(SYS_lseek, l->fd, 0, SEEK_END, 0, 0, 0) != l->end;
}

static size_t escaped(char *out, const char *path)
{
  size_t n = 0;
  for (; *path; path++)
    if (*path == '%' || *path == ';' || *path == '\n') {
      static const char digits[] = "0123456789ABCDEF";
      out[n++] = '%';
      out[n++] = digits[(unsigned char)*path >> 4];
      out[n++] = digits[*path & 15];
    } else
      out[n++] = *path;
  return n;
}

static void unescape(char *text)
{
  char *out = text;
  for (; *text; text++)
    if (*text == '%' && text[1] && text[2]) {
      int high = text[1] <= '9' ? text[1] - '0' : text[1] - 'A' + 10;
      int low = text[2] <= '9' ? text[2] - '0' : text[2] - 'A' + 10;
      *out++ = (char)(high << 4 | low);
      text += 2;
    } else
      *out++ = *text;
  *out = 0;
}

static int no_room(void)
{
  static const char say[] = "oars: the limit for the size of files (ulimit -f) is too small to write down what "
                            "the run changes: ranks may see each other's files\n";
  static int said;
  if (!said++) sys_write(2, say, sizeof say - 1);
  signal_taken(SIGXFSZ); /* where it went may be a file too */
  return -EFBIG;
}

/* One line, visible to every reader when this returns; table_lock is held. */
static int append(struct log *l, unsigned char tag, const char *kept, const char *path)
{
  static char line[3 * BIG + 600]; /* guarded by table_lock */
  size_t n = 0;
  line[n++] = '\n';
  line[n++] = (char)tag;
  line[n++] = ' ';
  if (kept) {
    size_t length = strlen(kept);
    memcpy(line + n, kept, length);
    n += length;
    line[n++] = ' ';
  }
  n += escaped(line + n, path);
  line[n++] = ';';
  line[n++] = '\n';
  changes_made++;
  long wrote = sys_write(l->fd, line, n);
  if (wrote == -EFBIG || (wrote >= 0 && wrote < (long)n)) { /* the script's limit; what is cut short does not count */
    limits script;
    signal_taken(SIGXFSZ);
    if (limits_lift(&script, (uint64_t)raw(SYS_lseek, l->fd, 0, SEEK_END, 0, 0, 0) + n) < 0) return no_room();
    wrote = sys_write(l->fd, line, n);
    limits_back(&script);
  }
  if (wrote != (long)n) return wrote < 0 ? (int)wrote : -ENOSPC;
  if (l->nfs) raw(SYS_fsync, l->fd, 0, 0, 0, 0, 0);
  if (raw(SYS_lseek, l->fd, 0, SEEK_END, 0, 0, 0) == l->end + (off_t)n) l->end += (off_t)n; /* nobody else wrote */
  return 0;
}

static void end_of_the_dead(void)
{
  if (raw(SYS_getpid, 0, 0, 0, 0, 0, 0) == config.voice_pid) {
    static const char say[] =
        "oars: this rank was taken for dead and another writes the run's files: it ends here\n";
    sys_write(2, say, sizeof say - 1);
  }
  raw(SYS_exit_group, 1, 0, 0, 0, 0, 0);
}

static volatile int to_follow; /* a child has learnt that its rank is the voice */

static void become_voice(void)
{
  config.side = VOICE;
  config.voice_pid = -1; /* the rank itself; see log_voice */
  for (uint32_t i = 0; i < entry_slots; i++)
    for (struct entry *e = entries[i]; e; e = e->next) e->mine = 0;
}

static void take_in(struct log *l, char *line)
{
  size_t length = strlen(line);
  if (length < 2 || line[length - 1] != ';') return;
  line[length - 1] = 0;
  char tag = line[0], *path = line + 2, *kept = NULL;
  if (length < 3) path = line + 1;
  if (l == &ledger && strchr("afdl", tag)) {
    kept = path;
    path = strchr(path, ' ');
    if (!path) return;
    *path++ = 0;
  }
  unescape(path);
  if (l == &ledger) {
    if (tag == '!') {
      if (config.side == VOICE && strcmp(path, config.token)) end_of_the_dead();
      strncpy(speaker, path, sizeof speaker - 1);
      return;
    }
    struct entry *e = entry_made(path);
    if (tag == 'a')
      e->appended = 1;
    else if (!e->before) {
      e->before = (unsigned char)tag;
      e->kept = kept ? keep_text(kept, strlen(kept)) : NULL;
    }
  } else if (tag == 'V') {
    if (config.side == OWN) {
      if (strcmp(speaker, config.token)) end_of_the_dead(); /* and has died since */
      become_voice();
      to_follow = 1;
    }
  } else
    set_mine(path, tag == 'H' ? HERE : tag == 'N' ? NEW : tag == 'G' ? GONE : 0);
}

static void read_log(struct log *l)
{
  for (;;) {
    long n = raw(SYS_pread64, l->fd, (long)incoming, sizeof incoming - 1, l->end, 0, 0);
    if (n <= 0) return;
    incoming[n] = 0;
    char *last = memrchr(incoming, '\n', (size_t)n);
    if (!last) return;
    for (char *line = incoming; line <= last;) {
      char *stop = memchr(line, '\n', (size_t)(last - line) + 1);
      *stop = 0;
      take_in(l, line);
      line = stop + 1;
    }
    l->end += last + 1 - incoming;
    news_number++;
  }
}

void news(void)
{
  int of_voice = grew(&ledger), of_ours = children && config.side == OWN && grew(&journal);
  if (!of_voice && !of_ours) return;
  signals kept = signals_off();
  lock_take(&table_lock);
  read_log(&ledger);
  if (children && journal.fd >= 0 && config.side == OWN) read_log(&journal);
  int follow = to_follow;
  to_follow = 0;
  lock_drop(&table_lock);
  if (follow) held_follow();
  signals_back(kept);
}

int note_before(unsigned char what, const char *kept, const char *path)
{
  int result = 0;
  signals s = signals_off();
  lock_take(&table_lock);
  struct entry *e = entry_made(path);
  if (what == 'a' && !e->appended) {
    result = append(&ledger, what, kept, path);
    e->appended = 1;
  } else if (what != 'a' && !e->before) {
    result = append(&ledger, what, kept, path);
    if (result >= 0) {
      e->before = what;
      e->kept = kept ? keep_text(kept, strlen(kept)) : NULL;
    }
  }
  lock_drop(&table_lock);
  signals_back(s);
  return result;
}

int mark(int state, const char *path)
{
  signals s = signals_off();
  lock_take(&table_lock);
  set_mine(path, state);
  int result = append(&journal, (unsigned char)(state == HERE ? 'H' : state == NEW ? 'N' : state == GONE ? 'G' : 'F'),
                      NULL, path);
  lock_drop(&table_lock);
  signals_back(s);
  return result;
}

/* This rank is the voice from here on: first it tells what is left of the last one, later its own children. */
int log_voice(int speaking)
{
  int result;
  signals s = signals_off();
  lock_take(&table_lock);
  read_log(&ledger);
  if (!speaking) {
    result = append(&ledger, '!', NULL, config.token);
    strcpy(speaker, config.token);
  } else {
    result = append(&journal, 'V', NULL, "");
    become_voice();
    config.voice_pid = (pid_t)raw(SYS_getpid, 0, 0, 0, 0, 0, 0);
    news_number++;
  }
  lock_drop(&table_lock);
  signals_back(s);
  return result;
}

int tables_open(enum side side)
{
  int result = log_open(&ledger, config.shared, "/ledger");
  struct log gate, order; /* the locks are in gate.c */
  char name[80] = "/order-"; /* once this rank is the voice its processes go on with the one in root */
  if (result >= 0) result = log_open(&gate, config.shared, "/gate");
  if (result < 0) return result;
  turn_fd = gate.fd; /* of all processes of the voices */
  if (side == OWN) {
    result = log_open(&journal, config.root, "/journal");
    if (result >= 0) result = log_open(&gate, config.root, "/gate");
    if (result < 0) return result;
    gate_fd = gate.fd;
  }
  strcat(name, config.token);
  result = log_open(&order, side == OWN ? config.root : config.shared, name);
  if (result < 0) return result;
  order_fd = order.fd;
  return 0;
}

/* While a thread looks things up others wait; a look is short. */
void tables_look(int begin)
{
  if (begin)
    lock_take(&table_lock);
  else
    lock_drop(&table_lock);
}

/* The folder that the voice has removed or moved and that had this number. */
const struct entry *entry_numbered(ino_t inode)
{
  char ending[32] = "-i";
  char digits[24];
  int n = 0, at = 2;
  do digits[n++] = (char)('0' + inode % 10); while (inode /= 10);
  while (n) ending[at++] = digits[--n];
  ending[at] = 0;
  for (uint32_t i = 0; i < entry_slots; i++)
    for (struct entry *e = entries[i]; e; e = e->next) {
      size_t length = e->before == 'd' ? strlen(e->kept) : 0;
      if (length > (size_t)at && !strcmp(e->kept + length - at, ending)) return e;
    }
  return NULL;
}

const struct entry *entry_kept_as(const char *name)
{
  for (uint32_t i = 0; i < entry_slots; i++)
    for (struct entry *e = entries[i]; e; e = e->next)
      if (e->kept && !strcmp(e->kept, name)) return e;
  return NULL;
}

/* ---- descriptors of ours, which a program that closes everything must not take away ---- */

int descriptor_is_ours(int fd)
{
  return fd >= 0 && config.side != OFF && (fd == ledger.fd || fd == journal.fd || fd == gate_fd || fd == order_fd ||
                                             fd == turn_fd);
}

void descriptor_moves(int fd)
{
  int *each[] = {&ledger.fd, &journal.fd, &gate_fd, &order_fd, &turn_fd};
  for (int i = 0; i < 5; i++)
    if (*each[i] == fd) *each[i] = (int)raw(SYS_fcntl, fd, F_DUPFD_CLOEXEC, fd + 1, 0, 0, 0);
}

void logs_are_read(void)
{
  if (journal.fd >= 0) journal.end = raw(SYS_lseek, journal.fd, 0, SEEK_END, 0, 0, 0);
}
