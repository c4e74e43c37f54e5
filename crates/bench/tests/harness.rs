//! The harness on the real kernel: workers, memory cgroups, RAM disks, and the remains of killed
//! processes. Tests that need root are skipped without it, with a message.
//!
//! Workers run this program: [`worker_process`] is no real test.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vellum_bench::engine::{Factory, Setting, VELLUM};
use vellum_bench::machine::{self, MemoryCgroup, RamDisk, Storage};
use vellum_bench::progress::Progress;
use vellum_bench::worker::{
    Cleaner, Contest, Launcher, LoadMethod, Member, Setup, Team, Terms, Worker, cache_bytes,
    make_file,
};
use vellum_bench::workload::{Lookup, Plan, Workload};
use vellum_testing::patience::{PATIENCE, eventually};

/// Set in processes that are workers or play another role.
const ROLE: &str = "VELLUM_BENCH_TEST_ROLE";

/// A peer for the workers of this program.
const TWIN: Factory = Factory { name: "twin", ..VELLUM };

/// RAM disks and remains are visible to the whole machine, so tests run one at a time.
static MACHINE: Mutex<()> = Mutex::new(());

fn machine() -> MutexGuard<'static, ()> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn worker_process() {
    match std::env::var(ROLE).as_deref() {
        Ok("worker") => vellum_bench::worker::main(&[TWIN]).unwrap(),
        Ok("hog") => hog(),
        Ok("owner") => own_and_wait(),
        _ => {}
    }
}

fn arguments() -> [&'static str; 4] {
    ["worker_process", "--exact", "--nocapture", "--test-threads=1"]
}

fn launcher() -> Launcher {
    Launcher::new(std::env::current_exe().unwrap(), &arguments()).env(ROLE, "worker")
}

fn somebody(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(arguments()).env(ROLE, role);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

fn alive(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
}

fn lookups(entries: u64) -> Workload {
    Workload::Lookup(Lookup { entries, batch: 1 })
}

fn plan(seconds: f64) -> Plan {
    Plan { threads: 2, seconds, seed: 1 }
}

/// Runs a workload for so many seconds, and for four times as long each time that it was not
/// enough. Whether it was at last.
fn longer_and_longer(seconds: f64, mut is_enough: impl FnMut(&Plan) -> bool) -> bool {
    (0..4).any(|attempt| is_enough(&plan(seconds * f64::from(1 << (2 * attempt)))))
}

/// The time that a process has had processors, in ticks of 10 ms.
fn processor_time(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let number = |at: usize| fields.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    number(11) + number(12)
}

fn loaded(worker: &mut Worker, directory: &Path, entries: u64) {
    worker.open("vellum", &Setting::new(directory, 4 << 20)).unwrap();
    worker.load(&lookups(entries)).unwrap();
    worker.settle().unwrap();
}

/// Whether this machine allows RAM disks and groups. Prints a line if not.
fn allowed<T>(what: anyhow::Result<T>) -> Option<T> {
    match what {
        Ok(thing) => Some(thing),
        Err(error) => {
            eprintln!("skipped: {error:#}");
            assert!(!rustix::process::geteuid().is_root() || is_container(), "{error:#}");
            None
        }
    }
}

/// The root user of a container may be unprivileged outside.
fn is_container() -> bool {
    !Path::new("/sys/class/zram-control").exists() || !Path::new("/sys/fs/cgroup").exists()
}

#[test]
fn a_worker_runs_an_engine() {
    let directory = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(&launcher(), "vellum", None).unwrap();
    loaded(&mut worker, directory.path(), 20_000);
    // On a busy machine it may need more time for so many operations, and moments.
    let enough = longer_and_longer(1.0, |plan| {
        let measured = worker.run(&lookups(20_000), plan).unwrap();
        measured.operations > 1000
    });
    assert!(enough, "too few operations");
    let every = Duration::from_millis(50);
    let enough = longer_and_longer(2.0, |plan| {
        let (measured, moments) = worker.run_watched(&lookups(20_000), plan, every).unwrap();
        assert!(moments.is_sorted_by(|a, b| a.seconds < b.seconds && a.usage.read <= b.usage.read));
        measured.operations > 1000 && moments.len() >= 5
    });
    assert!(enough, "too few operations or moments");
    assert!(worker.check(&lookups(20_000)).unwrap().is_empty());
    let (usage, group) = worker.usage().unwrap();
    assert!(usage.resident > 1 << 20 && group.is_none());
    worker.close().unwrap();
}

#[test]
fn what_an_engine_says_is_an_error_and_the_worker_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(&launcher(), "some", None).unwrap();
    let setting = Setting::new(directory.path(), 4 << 20);
    let error = format!("{:#}", worker.open("oracle", &setting).unwrap_err());
    assert!(error.starts_with("worker 'some': no engine 'oracle' here, only vellum"), "{error}");
    assert!(worker.load(&lookups(10)).is_err());
    loaded(&mut worker, directory.path(), 1000);
    assert!(worker.run(&lookups(2000), &plan(0.1)).is_err());
    worker.run(&lookups(1000), &plan(0.1)).unwrap();
}

#[test]
fn a_worker_that_is_killed_while_it_runs_is_an_error_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(&launcher(), "vellum", None).unwrap();
    loaded(&mut worker, directory.path(), 1000);
    let process = worker.process();
    let before = processor_time(process);
    let killer = thread::spawn(move || {
        // Until then it waits for a request.
        eventually("the worker runs", || processor_time(process) >= before + 20);
        kill_process(Pid::from_raw(process as i32).unwrap(), Signal::KILL).unwrap();
    });
    let start = Instant::now();
    let error = worker.run(&lookups(1000), &plan(600.0)).unwrap_err().to_string();
    assert!(error.contains("the worker 'vellum' died, running: signal: 9"), "{error}");
    assert!(start.elapsed() < PATIENCE);
    killer.join().unwrap();
}

#[test]
fn a_worker_within_a_limit_stays_within_it() {
    let limit = 32 << 20;
    let Some(group) = allowed(MemoryCgroup::create(limit)) else { return };
    drop(group);
    let directory = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(&launcher(), "vellum", Some(limit)).unwrap();
    let cache = cache_bytes(&VELLUM, limit);
    let entries = 4 * limit / 128;
    worker.open("vellum", &Setting::new(directory.path(), cache)).unwrap();
    worker.load(&lookups(entries)).unwrap();
    worker.settle().unwrap();
    worker.run(&lookups(entries), &plan(0.5)).unwrap();
    let (usage, group) = worker.usage().unwrap();
    let group = group.unwrap();
    assert!(usage.resident > cache / 2, "{usage:?}");
    assert!(group.bytes <= limit && group.peak <= limit, "{group:?}");
    assert!(group.bytes > cache / 2 && group.killed == 0, "{group:?}");
    assert!(usage.written > limit && usage.read > 0, "{usage:?}");
}

/// Allocates more and more memory, and prints how many MiB it has.
fn hog() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let mut all = Vec::new();
    for taken in 1..=256 {
        all.push(vec![taken as u8; 1 << 20]);
        println!("has {taken}");
    }
    assert!(all.iter().all(|part| part[77] > 0 || part[78] == 0));
}

#[test]
fn a_limit_limits() {
    use std::io::{Read as _, Write as _};

    let Some(group) = allowed(MemoryCgroup::create(32 << 20)) else { return };
    let mut child = somebody("hog").spawn().unwrap();
    group.add(child.id()).unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    let status = child.wait().unwrap();
    assert!(!status.success(), "it took 256 MiB of 32");
    let has = said.lines().filter(|line| line.starts_with("has")).count();
    assert!((16..=32).contains(&has), "{has} MiB");
    let usage = group.usage().unwrap();
    assert!(usage.killed >= 1 && usage.limit_met >= 1 && usage.peak <= 32 << 20, "{usage:?}");
}

#[test]
fn a_group_takes_its_processes_with_it() {
    let Some(group) = allowed(MemoryCgroup::create(32 << 20)) else { return };
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    group.add(child.id()).unwrap();
    let error = group.add(u32::MAX / 4).unwrap_err();
    assert!(format!("{error:#}").contains("cgroup.procs"), "{error:#}");
    drop(group);
    assert!(!child.wait().unwrap().success());
}

#[test]
fn a_worker_that_needs_more_than_its_limit_says_so() {
    let Some(group) = allowed(MemoryCgroup::create(24 << 20)) else { return };
    drop(group);
    let directory = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(&launcher(), "vellum", Some(24 << 20)).unwrap();
    // A pool that just fits the group, without any other memory.
    let open = worker.open("vellum", &Setting::new(directory.path(), 23 << 20));
    let error = open.and_then(|()| worker.load(&lookups(1_000_000))).unwrap_err().to_string();
    assert!(error.contains("needs more memory than its limit"), "{error}");
}

#[test]
fn a_ram_disk_comes_and_goes_twice() {
    let _one_at_a_time = machine();
    for round in 0..2 {
        let Some(disk) = allowed(RamDisk::set_up(64 << 20)) else { return };
        let (path, device) = (disk.path(), disk.device());
        let file = path.join("data");
        let bytes = vec![round + 1; 8 << 20];
        fs::write(&file, &bytes).unwrap();
        assert_eq!(fs::read(&file).unwrap(), bytes);
        // A full RAM disk is an error, as on any disk.
        let full = fs::write(path.join("more"), vec![3; 80 << 20]).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        drop(disk);
        assert!(!path.exists() && size_of_device(&device).is_none_or(|size| size == 0));
    }
}

fn size_of_device(device: &Path) -> Option<u64> {
    let name = device.file_name()?;
    let size = fs::read_to_string(Path::new("/sys/block").join(name).join("disksize")).ok()?;
    size.trim().parse().ok()
}

#[test]
fn storage_falls_back_to_the_directory_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let storage = Storage::fast(1 << 50, directory.path());
    assert_eq!(storage.directory(), directory.path());
    assert!(storage.about().contains("because"), "{}", storage.about());
}

/// Creates a RAM disk and a group, prints where they are, and waits to be killed.
fn own_and_wait() {
    let cleaner = std::env::var("CLEANER").is_ok().then(|| Cleaner::start(&launcher()).unwrap());
    let disk = RamDisk::set_up(32 << 20).unwrap();
    let _group = MemoryCgroup::create(64 << 20);
    let worker = Worker::start(&launcher(), "worker", None).unwrap();
    fs::write(disk.path().join("data"), "x").unwrap();
    println!("\nowner {} {} {}", worker.process(), disk.path().display(), cleaner.is_some());
    thread::sleep(Duration::from_secs(1000));
}

/// Starts a process that owns a worker and a RAM disk, and kills it. Returns the worker and the RAM
/// disk's directory.
fn owner_killed(with_cleaner: bool, signal: Signal) -> (u32, PathBuf) {
    let mut command = somebody("owner");
    if with_cleaner {
        command.env("CLEANER", "1");
    }
    let mut owner = command.spawn().unwrap();
    let (worker, disk) = owned(&mut owner);
    assert!(disk.join("data").exists() && alive(worker));
    kill_process(Pid::from_raw(owner.id() as i32).unwrap(), signal).unwrap();
    owner.wait().unwrap();
    (worker, disk)
}

/// Whether this process, and so its children, ignores a signal, as processes do that a shell has
/// started in the background.
fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 != 0
}

fn owned(owner: &mut Child) -> (u32, PathBuf) {
    use std::io::BufRead as _;

    let output = std::io::BufReader::new(owner.stdout.take().unwrap());
    let line = output.lines().map_while(Result::ok).find(|line| line.starts_with("owner "));
    let line = line.expect("the owner failed");
    let words: Vec<&str> = line.split(' ').collect();
    (words[1].parse().unwrap(), words[2].into())
}

#[test]
fn what_a_killed_run_leaves_is_removed_by_the_next() {
    let _one_at_a_time = machine();
    let Some(disk) = allowed(RamDisk::set_up(16 << 20)) else { return };
    let (worker, left) = owner_killed(false, Signal::KILL);
    eventually("the worker of a killed parent ends", || !alive(worker));
    assert!(left.join("data").exists(), "without a cleaner no process cleans up");
    assert!(machine::remove_leftovers() >= 1);
    assert!(!left.exists());
    // The devices and groups of a living process stay.
    assert!(disk.path().exists() && size_of_device(&disk.device()) == Some(16 << 20));
}

#[test]
fn a_cleaner_cleans_up_after_signals() {
    let _one_at_a_time = machine();
    let Some(disk) = allowed(RamDisk::set_up(16 << 20)) else { return };
    drop(disk);
    for signal in [Signal::KILL, Signal::INT, Signal::TERM] {
        if is_ignored(signal) {
            eprintln!("left out: {signal:?}, which this process inherited as ignored");
            continue;
        }
        let (worker, left) = owner_killed(true, signal);
        eventually("the cleaner removes the RAM disk", || !left.exists());
        eventually("the worker ends", || !alive(worker));
    }
}

#[test]
fn what_a_worker_let_go_does_not_weigh() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let expected = make_file(&path, 64 << 20).unwrap();
    let mut worker = Worker::start(&launcher(), "worker", None).unwrap();
    // Workers of other tests start and end, so this worker's share of their common program changes.
    let share = 12 << 20;
    let before = worker.weigh().unwrap().memory;
    for _ in 0..3 {
        worker.begin_hold(&LoadMethod::Read, &path).unwrap();
        assert_eq!(worker.held().unwrap(), expected);
        assert!(worker.weigh().unwrap().memory + share >= before + (64 << 20));
        worker.let_go().unwrap();
    }
    let after = worker.weigh().unwrap().memory;
    assert!(after < before + share, "{before} bytes, and then {after}");
}

fn setup(directory: &Path) -> Setup {
    Setup::with(launcher(), || Storage::disk(directory)).unwrap()
}

fn terms<'a>(setup: &'a Setup, workload: &'a Workload) -> Terms<'a> {
    Terms { setup, limit: None, workload, warm_up: plan(0.0), cold: false }
}

#[test]
fn a_team_competes() {
    let directory = tempfile::tempdir().unwrap();
    let (setup, workload) = (setup(directory.path()), lookups(20_000));
    let terms = Terms { warm_up: plan(0.05), cold: true, ..terms(&setup, &workload) };
    let members = [Member::plain(&VELLUM), Member::with_option(&VELLUM, "backend", "madvise")];
    let team = Team::start(&members, &terms, &Progress::hidden()).unwrap();
    assert_eq!(team.names(), ["vellum", "vellum madvise"]);
    let mut contest = Contest::of(&team);
    for name in team.names() {
        contest.add(name, name, workload.clone(), plan(0.05));
    }
    contest.add_other("nothing", || Ok(1.0));
    let series = contest.hold(3, &Progress::hidden()).unwrap();
    assert!(series[0].rate.values.len() == 3 && series[0].p99.values.len() == 3);
    assert!(series[2].p99.values.is_empty());
    let row = series[1].times(&series[0]);
    assert!(row.value > 0.0 && row.ratio == Some(row.value), "{row:?}");
    assert_eq!((&row.name[..], &row.unit[..]), ("vellum madvise / vellum", "x"));
    assert!(team.notes().iter().any(|note| note.contains("vellum madvise (cache")));
    assert!(team.worker("lmdb").is_err());
    drop(team);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "files are left");
}

#[test]
fn a_peer_that_fails_is_left_out_and_vellum_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let (setup, workload) = (setup(directory.path()), lookups(1000));
    let terms = terms(&setup, &workload);
    let mut peer = VELLUM;
    peer.name = "nobody";
    let members = [Member::plain(&VELLUM), Member::plain(&peer)];
    let team = Team::start(&members, &terms, &Progress::hidden()).unwrap();
    assert_eq!(team.names(), ["vellum"]);
    assert!(team.notes()[0].starts_with("nobody was left out: "), "{:?}", team.notes());
    let broken = [Member::with_option(&VELLUM, "backend", "magic")];
    assert!(Team::start(&broken, &terms, &Progress::hidden()).is_err());
}

#[test]
fn a_peer_that_dies_in_a_contest_is_out_and_the_others_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let (setup, workload) = (setup(directory.path()), lookups(1000));
    let terms = terms(&setup, &workload);
    let members = [Member::plain(&VELLUM), Member::plain(&TWIN)];
    let team = Team::start(&members, &terms, &Progress::hidden()).unwrap();
    assert_eq!(team.names(), ["vellum", "twin"]);
    let mut contest = Contest::of(&team);
    for name in team.names() {
        contest.add(name, name, workload.clone(), plan(0.05));
    }
    let kill = |name: &str| {
        let process = team.worker(name).unwrap().process();
        kill_process(Pid::from_raw(process as i32).unwrap(), Signal::KILL).unwrap();
    };
    kill("twin");
    let series = contest.hold(3, &Progress::hidden()).unwrap();
    assert_eq!((series.len(), &series[0].rate.name[..]), (1, "vellum"));
    assert_eq!(team.names(), ["vellum"]);
    let notes = team.notes().join("\n");
    assert!(notes.contains("twin is out: the worker 'twin' died, running"), "{notes}");
    let mut contest = Contest::of(&team);
    contest.add("vellum", "vellum", workload.clone(), plan(0.05));
    kill("vellum");
    assert!(contest.hold(1, &Progress::hidden()).is_err());
}
