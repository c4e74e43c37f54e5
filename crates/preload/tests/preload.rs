//! Unmodified programs with the library preloaded.

#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)] // LMDB's files are mapped

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use heed::types::Str;
use heed::{CommitOrAbort, EnvFlags, EnvOpenOptions};

use vellum_aquila::{Backend, BackendChoice as CacheChoice, Faults, Options};
use vellum_morsel::{BackendChoice, BackendKind, Client, Daemon, DaemonOptions, Provider};
use vellum_testing::patience::eventually;

const BYTES: usize = 100_000;

/// An unmodified program. It is written before any test starts a process: a process that starts
/// meanwhile would have it open for writing, and then it could not be executed.
static MAPS: LazyLock<PathBuf> = LazyLock::new(|| {
    let maps = Path::new(env!("CARGO_TARGET_TMPDIR")).join("maps");
    let own = maps.with_extension(std::process::id().to_string());
    fs::write(&own, include_bytes!(concat!(env!("OUT_DIR"), "/maps"))).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(own, &maps).unwrap();
    maps
});

/// A folder with a file and a daemon's socket.
struct DaemonFolder {
    folder: tempfile::TempDir,
    daemon: Option<(UnixStream, JoinHandle<()>)>,
}

impl DaemonFolder {
    fn new(bytes: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        fs::write(folder.path().join("model.bin"), bytes).unwrap();
        LazyLock::force(&MAPS);
        Self { folder, daemon: None }
    }

    fn with_daemon(provider: Provider, bytes: usize) -> Self {
        let mut place = Self::new(bytes);
        let options = DaemonOptions {
            socket: place.socket(),
            mode: 0o600,
            limit: 8 << 20,
            threads: 1,
            keep: false,
        };
        let daemon = Daemon::bind(provider, &options).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        place.daemon = Some((stop, thread::spawn(move || daemon.run(stopped).unwrap())));
        rest(&place.file());
        place
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("model.bin")
    }

    /// Sets a program up to run with the library preloaded.
    fn preload(&self, program: &mut Command, variables: &[(&str, &str)]) {
        let library = std::env::current_exe().unwrap().with_file_name("libvellum_preload.so");
        assert!(library.exists(), "{}", library.display());
        program.env("LD_PRELOAD", library).env("VELLUM_MORSELD", self.socket());
        program.env_remove("VELLUM_PRELOAD").env_remove("VELLUM_PRELOAD_MIN");
        program.env_remove("VELLUM_AQUILA").env_remove("VELLUM_AQUILA_MIN");
        program.envs(variables.iter().copied());
    }

    /// The output of a program with the library preloaded.
    fn says(&self, program: &mut Command, variables: &[(&str, &str)]) -> String {
        self.preload(program, variables);
        let output = program.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
        assert_eq!(said, "");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The ways of mapping that got a Morsel.
    fn morsels(&self, variables: &[(&str, &str)]) -> Vec<String> {
        self.ways_to_get("morsel", variables)
    }

    /// The same without the calls on each mapping, which take seconds on a slow machine.
    fn morsels_at_once(&self, variables: &[(&str, &str)]) -> Vec<String> {
        self.ways_of("morsel", Command::new(&*MAPS).arg("--kinds").arg(self.file()), variables)
    }

    /// The ways of mapping that got this kind of memory.
    fn ways_to_get(&self, kind: &str, variables: &[(&str, &str)]) -> Vec<String> {
        self.ways_of(kind, Command::new(&*MAPS).arg(self.file()), variables)
    }

    fn ways_of(
        &self,
        kind: &str,
        program: &mut Command,
        variables: &[(&str, &str)],
    ) -> Vec<String> {
        let said = self.says(program, variables);
        assert_eq!(said.lines().count(), 9, "{said}");
        let ways = said.lines().filter_map(|line| line.split_once(' '));
        ways.filter(|(_, found)| *found == kind).map(|(way, _)| way.to_owned()).collect()
    }
}

impl Drop for DaemonFolder {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.daemon.take() {
            drop(stop);
            // A test that has already failed must not panic again.
            let _ = thread.join();
        }
    }
}

const FOR_READING: [&str; 5] = ["shared", "private", "populated", "part", "end"];

/// All files, with any path and length.
const ALL: [(&str, &str); 1] = [("VELLUM_PRELOAD_MIN", "1")];

/// Waits until the last change of a file was so long ago that the daemon considers it at rest.
fn rest(file: &Path) {
    const LONG_AGO: u64 = 6;
    let changed = fs::metadata(file).unwrap().ctime().unsigned_abs();
    let since = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() - changed;
    while since() < LONG_AGO {
        thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a test with a daemon on each backend of this machine, at the same time, because most of the
/// time a file is to be at rest. Prints which backends it skips.
fn on_each(bytes: usize, test: impl Fn(&DaemonFolder) + Sync) {
    thread::scope(|scope| {
        for kind in BackendKind::ALL {
            match Provider::new(BackendChoice::Only(kind)) {
                Ok(provider) => {
                    let test = &test;
                    scope.spawn(move || test(&DaemonFolder::with_daemon(provider, bytes)));
                }
                Err(error) => {
                    assert!(kind == BackendKind::Kernel, "{error}");
                    println!("skipped on the backend '{kind}': {error}");
                }
            }
        }
    });
}

/// Python with a script, if the machine has it. A guest does not.
fn python(script: &str) -> Option<Command> {
    const PYTHON: &str = "/usr/bin/python3";
    if !Path::new(PYTHON).exists() {
        println!("skipped: no {PYTHON}");
        return None;
    }
    let mut python = Command::new(PYTHON);
    python.args(["-c", script]);
    Some(python)
}

#[test]
fn chosen_files_are_morsels_where_they_are_mapped_for_reading() {
    on_each(BYTES, |place| {
        assert_eq!(place.morsels(&[("VELLUM_PRELOAD", "/x:*/model.b?n")]), FOR_READING);
        assert_eq!(place.morsels(&[("VELLUM_PRELOAD_MIN", "100000")]), FOR_READING);
        let stat = Client::new(place.socket()).stat().unwrap();
        assert_eq!((stat.loads, stat.objects), (1, 1));
    });
}

#[test]
fn files_of_several_huge_pages_are_morsels() {
    on_each((5 << 20) + 123, |place| {
        assert_eq!(place.morsels(&[("VELLUM_PRELOAD", "*/model.bin")]), FOR_READING);
        let object = &Client::new(place.socket()).list().unwrap()[0];
        assert_eq!(object.mounts.unwrap_or(0), 0, "a program that has ended");
    });
}

#[test]
fn other_files_are_themselves() {
    on_each(BYTES, |place| {
        let none: [&str; 0] = [];
        assert_eq!(place.morsels(&[]), none);
        let others = [("VELLUM_PRELOAD", "*.gguf:/model.bin"), ("VELLUM_PRELOAD_MIN", "100001")];
        assert_eq!(place.morsels(&others), none);
        assert_eq!(Client::new(place.socket()).stat().unwrap().loads, 0);
    });
}

#[test]
fn without_a_daemon_files_are_themselves() {
    let none: [&str; 0] = [];
    let place = DaemonFolder::new(BYTES);
    assert_eq!(place.morsels(&[("VELLUM_PRELOAD", "*")]), none);
    // Another program that listens and closes the connection.
    let listener = std::os::unix::net::UnixListener::bind(place.socket()).unwrap();
    thread::spawn(move || while listener.accept().is_ok() {});
    assert_eq!(place.morsels(&[("VELLUM_PRELOAD", "*")]), none);
}

#[test]
fn a_file_that_the_daemon_refuses_is_itself() {
    let script = "import mmap, sys; f = open(sys.argv[1], 'rb'); \
                  m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); print(m[5], len(m))";
    on_each(BYTES, |place| {
        let file = fs::OpenOptions::new().append(true).open(place.file()).unwrap();
        // Holes up to beyond the limit. The program only reads the beginning.
        file.set_len(10 << 20).unwrap();
        drop(file);
        rest(&place.file());
        let Some(mut python) = python(script) else { return };
        let said = place.says(python.arg(place.file()), &[("VELLUM_PRELOAD", "*/model.bin")]);
        assert_eq!(said, format!("5 {}\n", 10 << 20));
        assert_eq!(Client::new(place.socket()).stat().unwrap().objects, 0);
    });
}

#[test]
fn unmodified_python_maps_a_morsel() {
    let script = "import mmap, sys\n\
                  f = open(sys.argv[1], 'rb')\n\
                  m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n\
                  assert len(m) == 100000 and all(m[i] == i % 251 for i in range(0, 100000, 97))\n\
                  part = mmap.mmap(f.fileno(), 4096, offset=8192, access=mmap.ACCESS_READ)\n\
                  assert part[0] == 8192 % 251\n\
                  maps = open('/proc/self/maps').read()\n\
                  print(maps.count('vellum-morsel'))\n\
                  m.close(); part.close()\n\
                  print(open('/proc/self/maps').read().count('vellum-morsel'))\n";
    on_each(BYTES, |place| {
        let Some(mut python) = python(script) else { return };
        let said = place.says(python.arg(place.file()), &[("VELLUM_PRELOAD", "*/model.bin")]);
        assert_eq!(said, "2\n0\n");
    });
}

/// Whether a process may have a cache whose threads handle its faults.
fn may_have_a_cache() -> bool {
    let only = CacheChoice::Only(Backend::Userfaultfd);
    let cache = Options::new(1 << 20).faults(Faults::Monitor).backend(only).build();
    cache.inspect_err(|error| println!("skipped: {error}")).is_ok()
}

/// All files, through a cache of the least size.
const THROUGH_A_CACHE: [(&str, &str); 2] =
    [("VELLUM_AQUILA_MIN", "1"), ("VELLUM_AQUILA_CACHE", "262144")];

/// The figures that the last process has left in a file.
fn statistics(path: &Path) -> HashMap<String, u64> {
    let text = fs::read_to_string(path).unwrap();
    let (_, figures) = text.lines().last().unwrap().split_once(": ").unwrap();
    let figure = |figure: &str| {
        let (value, name) = figure.split_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap())
    };
    figures.split(", ").map(figure).collect()
}

#[test]
fn chosen_files_are_cached_where_they_are_mapped_for_reading() {
    if !may_have_a_cache() {
        return;
    }
    for bytes in [BYTES, (1 << 20) + 123] {
        let place = DaemonFolder::new(bytes);
        let path = place.folder.path().join("statistics");
        let mut variables = THROUGH_A_CACHE.to_vec();
        variables.push(("VELLUM_AQUILA_STATISTICS", path.to_str().unwrap()));
        for more in [("VELLUM_AQUILA_DIRECT", "1"), ("VELLUM_AQUILA_POLICY", "lru")] {
            variables.push(more);
            assert_eq!(place.ways_to_get("cached", &variables), FOR_READING, "{more:?}");
            let found = statistics(&path);
            let evicted = if bytes > 262_144 { found["misses"] / 2 } else { 0 };
            assert!(found["frames"] == 64 && found["faults"] > 100, "{found:?}");
            assert!(found["evictions"] >= evicted, "{found:?}");
        }
        let others = [("VELLUM_AQUILA", "*.gguf:/model.bin"), ("VELLUM_AQUILA_POLICY", "clock")];
        assert_eq!(place.ways_to_get("cached", &others), [""; 0]);
        let wrong = [("VELLUM_AQUILA", "*"), ("VELLUM_AQUILA_POLICY", "random")];
        assert_eq!(place.ways_to_get("cached", &wrong), [""; 0]);
    }
}

/// Calls that have the kernel read the mapping, in the process that has mapped the file and in a
/// child of it.
#[test]
fn unmodified_python_writes_what_it_has_mapped() {
    let script = "import mmap, os, sys\n\
                  f = open(sys.argv[1], 'rb')\n\
                  m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n\
                  whole = open(sys.argv[1], 'rb').read()\n\
                  def check():\n\
                  \x20   out = os.memfd_create('out')\n\
                  \x20   assert os.write(out, m) == len(m)\n\
                  \x20   assert os.pread(out, len(m) + 1, 0) == whole\n\
                  \x20   assert m[-3000:] == whole[-3000:] and m.find(b'none') == -1\n\
                  check()\n\
                  child = os.fork()\n\
                  if child == 0:\n\
                  \x20   check()\n\
                  \x20   os._exit(7)\n\
                  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n\
                  check()\n\
                  print(open('/proc/self/maps').read().count('model.bin'))\n";
    if !may_have_a_cache() {
        return;
    }
    let place = DaemonFolder::new((1 << 20) + 777);
    let path = place.folder.path().join("statistics");
    let mut variables = THROUGH_A_CACHE.to_vec();
    variables.push(("VELLUM_AQUILA_STATISTICS", path.to_str().unwrap()));
    let Some(mut python) = python(script) else { return };
    // Of the file there is one page, which takes the mapping's place when it must.
    assert_eq!(place.says(python.arg(place.file()), &variables), "1\n");
    let found = statistics(&path);
    assert!(found["evictions"] > 256, "{found:?}");
}

#[test]
fn a_file_that_is_being_changed_is_mapped_itself() {
    let none: [&str; 0] = [];
    on_each(BYTES, |place| {
        let loads = || Client::new(place.socket()).stat().unwrap().loads;
        let writer = fs::OpenOptions::new().write(true).open(place.file()).unwrap();
        assert_eq!(place.morsels_at_once(&ALL), none);
        drop(writer);
        // A process that another test is about to start may have the descriptor for a moment.
        eventually("no process writes to it", || place.morsels_at_once(&ALL) == FOR_READING);
        assert_eq!(loads(), 1);
        // Writes the same bytes again. The daemon loads the file now, so that no later load takes
        // the time. A file that rests for longer than this is not being changed.
        let rest = Duration::from_secs(3);
        let mut loaded = 1;
        loop {
            let begun = Instant::now();
            fs::write(place.file(), fs::read(place.file()).unwrap()).unwrap();
            let file = fs::File::open(place.file()).unwrap();
            Client::new(place.socket()).load(&file, |_| {}).unwrap();
            loaded += 1;
            let found = place.morsels_at_once(&ALL);
            if begun.elapsed() < rest {
                assert_eq!((found, loads()), (none.map(str::to_owned).to_vec(), loaded));
                break;
            }
            assert!(loaded < 100, "the machine is too slow");
        }
    });
}

/// A program that prints an answer to each line of input.
struct Asked {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Asked {
    fn start(place: &DaemonFolder, program: &mut Command, variables: &[(&str, &str)]) -> Self {
        place.preload(program, variables);
        let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, answers }
    }

    /// The next line that begins with "found "; the harness of tests has lines of its own.
    fn finds(&mut self) -> String {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "the reader has ended");
            if let Some((_, found)) = line.trim_end().split_once("found ") {
                return found.to_owned();
            }
        }
    }
}

impl Asked {
    /// Fails unless the program has a mapping of its cache.
    #[track_caller]
    fn assert_cached(&self) {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.child.id())).unwrap();
        // The counters of the cache have a longer name.
        assert!(maps.lines().any(|line| line.contains("vellum-aquila ")), "{maps}");
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Names the database for [`reads_lmdb`], which runs while a writer does.
const LMDB: &str = "VELLUM_TEST_LMDB";

#[test]
#[ignore = "the reader of lmdb_sees_what_a_writer_beside_commits"]
fn reads_lmdb() {
    let Some(folder) = std::env::var_os(LMDB) else { return };
    let mut options = EnvOpenOptions::new();
    // SAFETY: the database is opened once in this process, and only LMDB changes it.
    let env = unsafe { options.map_size(1 << 20).flags(EnvFlags::READ_ONLY).open(folder) }.unwrap();
    let opened = env.open_databases_and_commit(env.read_txn().unwrap(), |opener, reader| {
        opener.open_database::<Str, Str>(reader, None).map(CommitOrAbort::<_, ()>::Commit)
    });
    let tree = opened.unwrap().unwrap_commit().unwrap();
    for _ in std::io::stdin().lines() {
        println!("found {}", tree.len(&env.read_txn().unwrap()).unwrap());
    }
}

#[test]
fn lmdb_sees_what_a_writer_beside_commits() {
    on_each(BYTES, |place| lmdb_beside_a_writer(place, &ALL, Order::WriterFirst));
    if may_have_a_cache() {
        for order in [Order::WriterFirst, Order::ReaderFirst] {
            lmdb_beside_a_writer(&DaemonFolder::new(BYTES), &THROUGH_A_CACHE, order);
        }
    }
}

/// Whether the reader maps the file before the writer opens it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    WriterFirst,
    ReaderFirst,
}

fn lmdb_beside_a_writer(place: &DaemonFolder, variables: &[(&str, &str)], order: Order) {
    let folder = place.folder.path().join("lmdb");
    fs::create_dir(&folder).unwrap();
    let open = || {
        let mut options = EnvOpenOptions::new();
        // SAFETY: this process has the database open once at a time, and only LMDB changes it.
        let env = unsafe { options.map_size(1 << 20).open(&folder) }.unwrap();
        let made = env.create_databases_and_commit(env.write_txn().unwrap(), |opener, writer| {
            opener.create_database::<Str, Str>(writer, None).map(CommitOrAbort::<_, ()>::Commit)
        });
        let tree = made.unwrap().commit().unwrap();
        (env, tree)
    };
    let (env, tree) = open();
    let writer = match order {
        Order::WriterFirst => {
            rest(&folder.join("data.mdb"));
            Some((env, tree))
        }
        Order::ReaderFirst => {
            env.prepare_for_closing().wait();
            None
        }
    };
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["reads_lmdb", "--exact", "--ignored", "--nocapture"]).env(LMDB, &folder);
    let mut reader = Asked::start(place, &mut program, variables);
    assert_eq!(reader.finds(), "0");
    let (env, tree) = writer.unwrap_or_else(|| {
        reader.assert_cached();
        open()
    });
    for (key, found) in [("a", "1"), ("b", "2")] {
        let mut writer = env.write_txn().unwrap();
        tree.put(&mut writer, key, "value").unwrap();
        writer.commit().unwrap();
        assert_eq!(reader.finds(), found);
    }
}

#[test]
fn sqlite_sees_what_a_writer_beside_commits() {
    on_each(BYTES, |place| sqlite_beside_a_writer(place, &ALL, Order::WriterFirst));
    if may_have_a_cache() {
        for order in [Order::WriterFirst, Order::ReaderFirst] {
            sqlite_beside_a_writer(&DaemonFolder::new(BYTES), &THROUGH_A_CACHE, order);
        }
    }
}

fn sqlite_beside_a_writer(place: &DaemonFolder, variables: &[(&str, &str)], order: Order) {
    let writer = "import sqlite3, sys\n\
                  db = sqlite3.connect(sys.argv[1])\n\
                  db.execute('create table if not exists t (n)')\n\
                  db.commit()\n\
                  print('found 0', flush=True)\n\
                  for line in sys.stdin:\n\
                  \x20   db.execute('insert into t values (1)')\n\
                  \x20   db.commit()\n\
                  \x20   print('found 0', flush=True)\n";
    let reader = "import sqlite3, sys\n\
                  db = sqlite3.connect('file:' + sys.argv[1] + '?mode=ro', uri=True)\n\
                  db.execute('pragma mmap_size=1000000')\n\
                  for line in sys.stdin:\n\
                  \x20   print('found', db.execute('select count(*) from t').fetchone()[0], \
                                flush=True)\n";
    let file = place.folder.path().join("db.sqlite");
    let (Some(mut writing), Some(mut reader)) = (python(writer), python(reader)) else { return };
    let mut writer = Asked::start(place, writing.arg(&file), variables);
    writer.finds();
    if order == Order::ReaderFirst {
        drop(writer);
        let mut reader = Asked::start(place, reader.arg(&file), variables);
        assert_eq!(reader.finds(), "1");
        reader.assert_cached();
        writer = Asked::start(place, &mut writing, variables);
        // The first answer is from before the first request.
        writer.finds();
        writer.finds();
        let after = reader.finds();
        assert!(after.parse::<u32>().unwrap() > 1, "{after}");
        return;
    }
    rest(&file);
    let mut reader = Asked::start(place, reader.arg(&file), variables);
    // The first request has written one row.
    for _ in 0..3 {
        let before: u32 = reader.finds().parse().unwrap();
        writer.finds();
        writer.finds();
        let after: u32 = reader.finds().parse().unwrap();
        assert!(after > before, "{before} and then {after}");
    }
}
