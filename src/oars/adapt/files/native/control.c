/* When the library begins to act, and what the Python side asks of it (oars.adapt.files).
 *
 * A rank calls oars_files_begin with the name of a file that says which side it is on. Its children find that name in
 * their environment (OARS_FILES) and begin by themselves. Both variables are taken out of the environment then, and
 * given back to children only, so a script's environment is that of one process.
 */
#include "files.h"
#include <pthread.h>

char environment_files[PATH_MAX + 16], library_path[PATH_MAX];

static void forked_before(void) { tables_before_fork(); }
static void forked_parent(void) { tables_after_fork(); }
static void forked_child(void)
{
  tables_after_fork();
  work_forked();
  trap_this_thread();
}

static char *value_of(char *text, const char *key)
{
  size_t n = strlen(key);
  for (char *line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
    if (!strncmp(line, key, n) && line[n] == ' ') return line + n + 1;
  return NULL;
}

static int value_to(char *text, const char *key, char *out, size_t room)
{
  const char *value = value_of(text, key);
  if (!value) return -EINVAL;
  size_t n = strcspn(value, "\n");
  if (n >= room) return -ENAMETOOLONG;
  memcpy(out, value, n);
  out[n] = 0;
  return 0;
}

static int begin(const char *file, int child)
{
  static char text[1 << 16];
  int fd = sys_open(file, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return fd;
  long n = raw(SYS_read, fd, (long)text, sizeof text - 1, 0, 0, 0);
  sys_close(fd);
  if (n < 0) return (int)n;
  text[n] = 0;
  char side[16], pid[24];
  int result = value_to(text, "side", side, sizeof side);
  if (result >= 0) result = value_to(text, "token", config.token, sizeof config.token);
  if (result >= 0) result = value_to(text, "pid", pid, sizeof pid);
  if (result >= 0) result = value_to(text, "shared", config.shared, sizeof config.shared);
  if (result >= 0 && !strcmp(side, "own")) result = value_to(text, "root", config.root, sizeof config.root - 8);
  if (result < 0) return result;
  strcpy(config.kept, config.shared);
  strncat(config.kept, "/kept", sizeof config.kept - strlen(config.kept) - 1);
  strcpy(config.tree, config.root);
  strcat(config.tree, "/tree");
  config.kept_length = strlen(config.kept);
  config.tree_length = strlen(config.tree);
  config.root_length = strlen(config.root);
  config.voice_pid = (pid_t)atoi(pid);
  char *through = value_of(text, "through");
  config.through = arena(strlen(through ? through : "") + 2);
  if (through) { /* one a line, to the end */
    char *out = config.through;
    for (char *line = through; *line;) {
      size_t length = strcspn(line, "\n");
      memcpy(out, line, length);
      out += length;
      if (length) *out++ = 0;
      line += length + (line[length] == '\n');
    }
    *out = 0;
  }
  enum side now = !strcmp(side, "own") ? OWN : VOICE;
  strcpy(environment_files, "OARS_FILES=");
  strncat(environment_files, file, PATH_MAX);
  result = tables_open(now);
  if (result < 0) return result;
  if (child) born_of_a_rank();
  config.side = now;
  news();
  static int hooked;
  if (!hooked++) pthread_atfork(forked_before, forked_parent, forked_child);
  trap_look();
  return 0;
}

static void take_out(void)
{
  char *preload = getenv("LD_PRELOAD"), *ours = preload ? strstr(preload, library_path) : NULL;
  if (!*library_path || !ours) return;
  char rest[2 * PATH_MAX];
  size_t before = (size_t)(ours - preload), after = strlen(ours) - strlen(library_path);
  if (before + after >= sizeof rest) return;
  if (before && !after) before--; /* the colon */
  memcpy(rest, preload, before);
  memcpy(rest + before, ours + strlen(library_path) + (!before && after ? 1 : 0), after - (!before && after ? 1 : 0));
  rest[before + after - (!before && after ? 1 : 0)] = 0;
  if (*rest)
    setenv("LD_PRELOAD", rest, 1);
  else
    unsetenv("LD_PRELOAD");
}

volatile int loaded;

/* A child of a rank begins: when the dynamic loader comes to us, or at the first call, whichever is earlier. */
__attribute__((constructor)) void load(void)
{
  if (loaded) return;
  loaded = 1;
  Dl_info us;
  if (dladdr((void *)load, &us) && us.dli_fname) strncpy(library_path, us.dli_fname, sizeof library_path - 1);
  const char *file = getenv("OARS_FILES");
  char name[PATH_MAX];
  if (file && strlen(file) < sizeof name) {
    strcpy(name, file);
    unsetenv("OARS_FILES");
    begin(name, 1); /* a run folder that is gone: its rank has ended */
    take_out();     /* else a launcher's wrapper hands it on to the rank */
  }
}

/* ---- what Python calls ---- */

EXPORT int oars_files_begin(const char *file) { return begin(file, 0); }
EXPORT int oars_files_side(void) { return config.side; }
EXPORT void oars_files_plain(int more) { plain_mode += more; }
EXPORT long oars_files_changes(void) { return changes_made; }
EXPORT int oars_files_alone(double seconds) { return gate_alone(seconds); }
EXPORT void oars_files_open(void) { gate_open(); }
EXPORT void oars_files_pass(void) { gate_pass(); }

/* The canonical name of a path and the real place that stands for it (BIG bytes each); its state, or -errno. */
EXPORT int oars_files_find(const char *path, int follow, char *where, char *target)
{
  struct work *w = work_begin();
  news();
  int result = absolute(AT_FDCWD, path, w->first);
  if (result >= 0) result = find(w, &w->a, w->first, follow);
  if (result >= 0) {
    strcpy(where, w->a.where);
    strcpy(target, w->a.target);
    result = w->a.state;
  }
  work_end(w);
  return result;
}

EXPORT int oars_files_mark(const char *path, int state)
{
  int result = mark(state, path);
  forget_ways();
  return result;
}

EXPORT int oars_files_promise(const char *path, int in_place)
{
  struct work *w = work_begin();
  int result = voice_promise(w, path, in_place);
  work_end(w);
  return result;
}

EXPORT int oars_files_speak(void)
{
  int result = log_voice(0);
  turns_of_others_end(10);
  return result;
}

EXPORT int oars_files_become_voice(void)
{
  held_follow();
  int result = log_voice(1);
  forget_ways();
  return result;
}

EXPORT size_t oars_files_room(void) { return BIG; }
