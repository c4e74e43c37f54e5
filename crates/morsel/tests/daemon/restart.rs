//! The next daemon at a socket takes over the files of the one before it, with the module.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use vellum_morsel::{
    Access, BackendChoice, BackendKind, Client, Daemon, DaemonOptions, Provider, Seals, Shape,
};

use crate::common::{Loading, eventually, load, options, pattern};

/// The variable that makes a process a daemon, with its backend, its socket and its limit.
const DAEMON: &str = "VELLUM_TEST_DAEMON";

const LIMIT: u64 = 16 << 20;

/// A folder with a daemon's socket and files.
struct DaemonFolder {
    folder: tempfile::TempDir,
    backend: BackendKind,
}

impl DaemonFolder {
    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Starts a daemon in its own process, and waits until it answers.
    fn daemon(&self, limit: u64) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["restart::a_daemon_in_its_own_process", "--exact", "--ignored"]);
        let socket = self.socket();
        let words = format!("{} {} {limit}", self.backend, socket.display());
        command.env(DAEMON, words).stdin(Stdio::null()).stdout(Stdio::null());
        let process = Process(command.spawn().unwrap());
        eventually("the daemon answers", || self.client().stat().is_ok());
        process
    }

    fn client(&self) -> Client {
        Client::new(self.socket())
    }

    fn file(&self, name: &str, bytes: &[u8]) -> (PathBuf, File) {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        (path.clone(), File::open(path).unwrap())
    }

    /// The folder in which the daemon's Morsels have names.
    fn kept(&self) -> PathBuf {
        let place = std::env::var_os("VELLUM_MORSELS").filter(|place| !place.is_empty());
        let place = place.unwrap_or_else(|| "/run/vellum/morsels".into());
        let socket = self.socket().as_os_str().as_bytes().to_vec();
        let dashes = socket.into_iter().map(|byte| if byte == b'/' { b'-' } else { byte });
        let name = OsString::from_vec(b"cache".iter().copied().chain(dashes).collect());
        Path::new(&place).join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.kept()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for DaemonFolder {
    fn drop(&mut self) {
        // The files of a test take memory until they are removed. A test that has already failed
        // must not panic again.
        let _ = fs::remove_dir_all(self.kept());
    }
}

/// A daemon process, killed when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a test on each backend of this machine.
fn on_each(test: impl Fn(&DaemonFolder)) {
    for backend in BackendKind::ALL {
        match Provider::new(BackendChoice::Only(backend)) {
            Ok(_) => test(&DaemonFolder { folder: tempfile::tempdir().unwrap(), backend }),
            Err(error) => {
                assert!(backend == BackendKind::Kernel, "{error}");
                println!("skipped on the backend '{backend}': {error}");
            }
        }
    }
}

/// As [`on_each`], but only with the module.
fn with_names(test: impl Fn(&DaemonFolder)) {
    on_each(|place| {
        if place.backend == BackendKind::Kernel {
            test(place);
        }
    });
}

#[test]
#[ignore = "other tests start this as a process"]
fn a_daemon_in_its_own_process() {
    let words = std::env::var(DAEMON).unwrap();
    let words: Vec<&str> = words.split(' ').collect();
    let backend = BackendKind::ALL.into_iter().find(|kind| kind.name() == words[0]).unwrap();
    let provider = Provider::new(BackendChoice::Only(backend)).unwrap();
    let options =
        DaemonOptions { keep: true, ..options(Path::new(words[1]), words[2].parse().unwrap()) };
    // The daemon runs until the test kills it.
    let (_never, stop) = UnixStream::pair().unwrap();
    Daemon::bind(provider, &options).unwrap().run(stop).unwrap();
}

#[test]
fn files_are_found_again_after_the_daemon_was_killed() {
    on_each(|place| {
        let first = place.daemon(LIMIT);
        let (path, file) = place.file("file", &pattern((3 << 20) + 123));
        let (_, other) = place.file("other", &pattern(5_000));
        let loaded = place.client().load(&file, |_| {}).unwrap();
        let mapping = loaded.morsel.map(Access::Read).unwrap();
        load(&place.client(), &other);
        let before = place.client().stat().unwrap();
        drop(first);
        assert!(mapping.view().unwrap() == pattern((3 << 20) + 123));

        let _second = place.daemon(LIMIT);
        let stat = place.client().stat().unwrap();
        if place.backend == BackendKind::Memfd {
            // A memfd has no name by which a daemon could find it.
            assert_eq!((stat.objects, stat.used), (0, 0));
            assert!(!load(&place.client(), &file).1);
            return;
        }
        assert_eq!((stat.objects, stat.used, stat.loads), (2, before.used, 0));
        let list = || place.client().list().unwrap();
        assert!(list().iter().all(|object| object.name.starts_with("inode ")), "{:?}", list());
        // Children of other tests have the mapping, too, until they run their programs.
        let mounts = || list().iter().map(|object| object.mounts).max();
        eventually("only this process maps it", || mounts() == Some(Some(1)));
        let (bytes, was_there) = load(&place.client(), &file);
        assert!(was_there && bytes == pattern((3 << 20) + 123));
        assert_eq!(load(&place.client(), &other), (pattern(5_000), true));
        assert_eq!(place.client().stat().unwrap().loads, 0);
        assert!(list().iter().any(|object| object.name == path.to_str().unwrap()), "{:?}", list());
    });
}

#[test]
fn changed_and_removed_files_are_not_found_again() {
    with_names(|place| {
        let first = place.daemon(LIMIT);
        let (path, file) = place.file("file", &pattern(10_000));
        let (_, removed) = place.file("removed", &pattern(10_000));
        load(&place.client(), &file);
        load(&place.client(), &removed);
        assert_eq!(place.client().remove(&removed).unwrap(), 1);
        assert_eq!(place.names().len(), 1);
        drop(first);
        let writer = File::options().write(true).open(&path).unwrap();
        writer.write_all_at(b"new", 100).unwrap();

        let second = place.daemon(LIMIT);
        let (bytes, was_there) = load(&place.client(), &file);
        assert!(!was_there && bytes[100..103] == *b"new");
        assert!(!load(&place.client(), &removed).1);
        assert_eq!((place.client().stat().unwrap().objects, place.names().len()), (2, 2));
        drop(second);

        let _third = place.daemon(LIMIT);
        assert!(load(&place.client(), &file).1 && load(&place.client(), &removed).1);
    });
}

#[test]
fn with_a_lower_limit_the_files_loaded_longest_ago_go() {
    with_names(|place| {
        let first = place.daemon(LIMIT);
        let files: Vec<File> =
            (0..3).map(|at| place.file(&format!("{at}"), &pattern(4096)).1).collect();
        for file in &files {
            load(&place.client(), file);
        }
        drop(first);
        let _second = place.daemon(2 * 4096);
        assert_eq!(place.names().len(), 2);
        let was_there: Vec<bool> =
            [2, 1, 0].map(|at: usize| load(&place.client(), &files[at]).1).into();
        assert_eq!(was_there, [true, true, false]);
    });
}

#[test]
fn an_interrupted_load_leaves_nothing() {
    with_names(|place| {
        let first = place.daemon(1 << 40);
        let path = place.folder.path().join("endless");
        File::create(&path).unwrap().set_len(16 << 30).unwrap();
        let mut loading = Loading::start(&place.socket(), &path);
        let before = loading.done();
        while loading.done() == before {}
        assert!(place.names().is_empty());
        drop(first);
        loading.kill();
        let _second = place.daemon(1 << 40);
        let stat = place.client().stat().unwrap();
        assert_eq!((stat.objects, stat.used), (0, 0));
    });
}

#[test]
fn incomplete_files_are_removed() {
    with_names(|place| {
        let first = place.daemon(LIMIT);
        let (_, file) = place.file("file", &pattern(5_000));
        load(&place.client(), &file);
        drop(first);
        let [name] = &place.names()[..] else { panic!("{:?}", place.names()) };
        // Renames it to the name of another file: the inode is the second number.
        let parts: Vec<&str> = name.split('-').collect();
        let planted = |inode: &str| {
            let mut parts = parts.clone();
            parts[1] = inode;
            place.kept().join(parts.join("-"))
        };
        File::create(planted("a1")).unwrap();
        fs::create_dir(planted("a2")).unwrap();
        File::create(place.kept().join("notes")).unwrap();
        let provider = Provider::new(BackendChoice::Only(place.backend)).unwrap();
        let morsels = [(5_000, true, "a3"), (4_999, true, "a4"), (5_000, false, "a5")];
        for (length, is_filled, inode) in morsels {
            let plain = format!("test-{}-{inode}", std::process::id());
            let morsel = provider.create_named(&plain, &Shape::of_length(length)).unwrap();
            if is_filled {
                morsel.fill(&file, 0, 0, length).unwrap();
            }
            // The first one is complete, but not sealed.
            if inode != "a3" {
                morsel.seal(Seals::CONTENT).unwrap();
            }
            fs::rename(place.kept().with_file_name(plain), planted(inode)).unwrap();
        }
        assert_eq!(place.names().len(), 7);

        let _second = place.daemon(LIMIT);
        assert_eq!(&place.names()[..], &[name.clone()][..]);
        assert_eq!(place.client().stat().unwrap().objects, 1);
        assert_eq!(load(&place.client(), &file), (pattern(5_000), true));
    });
}

#[test]
fn a_folder_that_others_may_enter_is_not_used() {
    with_names(|place| {
        drop(place.daemon(LIMIT));
        let provider = || Provider::new(BackendChoice::Only(place.backend)).unwrap();
        let options = DaemonOptions { keep: true, ..options(&place.socket(), LIMIT) };
        let why = || Daemon::bind(provider(), &options).unwrap().kept().map_err(str::to_owned);
        assert_eq!(why(), Ok(0));
        fs::set_permissions(place.kept(), Permissions::from_mode(0o750)).unwrap();
        assert!(why().unwrap_err().contains("remove it"));
        fs::set_permissions(place.kept(), Permissions::from_mode(0o700)).unwrap();
        chown(place.kept(), Some(12_345), None).unwrap();
        assert!(why().unwrap_err().contains("remove it"));
        chown(place.kept(), Some(0), None).unwrap();
        // Another daemon has the folder.
        let holder = File::open(place.kept()).unwrap();
        holder.lock().unwrap();
        assert!(why().unwrap_err().contains("another daemon"));
        drop(holder);
        // A process that another test is starting has a copy of the descriptor for a moment.
        eventually("no process has its lock", || why() == Ok(0));
    });
}

#[test]
fn a_daemon_that_keeps_nothing_says_why_and_frees_the_memory() {
    on_each(|place| {
        let first = place.daemon(LIMIT);
        load(&place.client(), &place.file("file", &pattern(5_000)).1);
        drop(first);
        let provider = Provider::new(BackendChoice::Only(place.backend)).unwrap();
        let options = options(&place.socket(), LIMIT);
        let keeps = DaemonOptions { keep: true, ..options.clone() };
        let daemon = Daemon::bind(provider, &options).unwrap();
        assert!(daemon.kept().unwrap_err().contains("asked not to"));
        assert!(!place.kept().exists());
        drop(daemon);
        let provider = Provider::new(BackendChoice::Only(place.backend)).unwrap();
        let kept = Daemon::bind(provider, &keeps).unwrap().kept().map_err(str::to_owned);
        match place.backend {
            BackendKind::Kernel => assert_eq!(kept, Ok(0)),
            _ => assert!(kept.unwrap_err().contains("names")),
        }
    });
}
