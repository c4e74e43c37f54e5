//! Programs that know nothing of Morsels, with the library preloaded.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::thread::{self, JoinHandle};

use vellum_morsel::{BackendChoice, BackendKind, Client, Daemon, DaemonOptions, Provider};

const BYTES: usize = 100_000;

/// The program that knows nothing of Morsels. It is written before any test starts a process: one
/// that was starting then would hold it open for writing, and it could not be executed.
static MAPS: LazyLock<PathBuf> = LazyLock::new(|| {
    let maps = Path::new(env!("CARGO_TARGET_TMPDIR")).join("maps");
    let own = maps.with_extension(std::process::id().to_string());
    fs::write(&own, include_bytes!(concat!(env!("OUT_DIR"), "/maps"))).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(own, &maps).unwrap();
    maps
});

/// A folder with a file and a daemon's socket.
struct Place {
    folder: tempfile::TempDir,
    daemon: Option<(UnixStream, JoinHandle<()>)>,
}

impl Place {
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
        place
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("model.bin")
    }

    /// What a program says with the library preloaded.
    fn says(&self, program: &mut Command, variables: &[(&str, &str)]) -> String {
        let library = std::env::current_exe().unwrap().with_file_name("libvellum_preload.so");
        assert!(library.exists(), "{}", library.display());
        program.env("LD_PRELOAD", library).env("VELLUM_MORSELD", self.socket());
        program.env_remove("VELLUM_PRELOAD").env_remove("VELLUM_PRELOAD_MIN");
        let output = program.envs(variables.iter().copied()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
        assert_eq!(said, "");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The ways of mapping that were answered with a Morsel.
    fn morsels(&self, variables: &[(&str, &str)]) -> Vec<String> {
        let mut program = Command::new(&*MAPS);
        let said = self.says(program.arg(self.file()), variables);
        assert_eq!(said.lines().count(), 8, "{said}");
        said.lines().filter_map(|line| line.strip_suffix(" morsel")).map(str::to_owned).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.daemon.take() {
            drop(stop);
            // A test that has failed already need not fail twice.
            let _ = thread.join();
        }
    }
}

const FOR_READING: [&str; 6] =
    ["shared", "private", "populated", "part", "end", "read-write-private"];

/// Runs a test with a daemon on each backend of this machine; says which are left out.
fn on_each(bytes: usize, test: impl Fn(&Place)) {
    for kind in BackendKind::ALL {
        match Provider::new(BackendChoice::Only(kind)) {
            Ok(provider) => test(&Place::with_daemon(provider, bytes)),
            Err(error) => {
                assert!(kind == BackendKind::Kernel, "{error}");
                println!("skipped on the backend '{kind}': {error}");
            }
        }
    }
}

/// Python with a script, where it is: not in a guest.
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
    let place = Place::new(BYTES);
    assert_eq!(place.morsels(&[("VELLUM_PRELOAD", "*")]), none);
    // Something else that listens, and hangs up.
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
        // Holes up to beyond the limit; the program looks at the beginning alone.
        file.set_len(10 << 20).unwrap();
        let Some(mut python) = python(script) else { return };
        let said = place.says(python.arg(place.file()), &[("VELLUM_PRELOAD", "*/model.bin")]);
        assert_eq!(said, format!("5 {}\n", 10 << 20));
        assert_eq!(Client::new(place.socket()).stat().unwrap().objects, 0);
    });
}

#[test]
fn python_maps_a_morsel_without_knowing() {
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
