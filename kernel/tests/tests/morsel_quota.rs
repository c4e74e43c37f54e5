//! The file system: limits on the memory of Morsels, names, and the rights of users.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read as _, Write as _, pipe};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};

use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::child::{Child, End, become_user, in_child};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound, field};
use vellum_kernel_tests::morsel::{kinds, plan};
use vellum_kernel_tests::{Errno, Morsel, Mounted, PAGE, morsel_turn, sys};
use vellum_uapi::morsel::{self, extent};

const MIB: u64 = 1 << 20;

fn shaped(mounted: &Mounted, order: u32, length: u64, flags: u64) -> Morsel {
    let morsel = mounted.nameless();
    morsel.create(&plan(order, length, flags)).unwrap();
    morsel
}

/// Every call that populates a page reports that the quota is used up. Present pages still work.
#[test]
fn the_quota_is_never_exceeded() {
    let Some(_turn) = morsel_turn() else { return };
    let source = Backing::cached(1);
    let before = Memory::now();
    for (order, flags) in kinds().into_iter().filter(|(order, _)| *order > 1) {
        let mounted = Mounted::new("size=16m").unwrap();
        assert_eq!((mounted.used(), mounted.inodes()), (0, 1), "the folder has an inode");
        let morsel = shaped(&mounted, order, extent(2), flags);
        let mapping = morsel.mapped();
        assert_eq!(morsel.populate(0, 64 * MIB), Err(Errno::NOSPC));
        let stat = morsel.stat();
        assert_eq!(mounted.used(), stat.pages + stat.tables);
        assert!((4000..=4096).contains(&mounted.used()), "{stat:?}");
        // The remaining space, if any, is too little for a table and a page.
        let page = 200_000;
        let offset = page * PAGE as u64;
        let address = mapping.page(page);
        assert_eq!(morsel.populate(offset, 1), Err(Errno::NOSPC));
        assert_eq!(rustix::io::pwrite(&morsel, &[1], offset), Err(Errno::NOSPC));
        assert_eq!(morsel.fill(&source.file, 0, offset, 4096), (0, Err(Errno::NOSPC)));
        let fault = Fault { signal: libc::SIGBUS, address };
        assert_eq!(access::load(address), Err(fault));
        assert_eq!(access::store(address, 1), Err(fault));
        assert_eq!(access::kernel_store(address, &[1]), Err(Errno::FAULT));
        assert_eq!(access::store(mapping.start(), 7), Ok(()));
        assert_eq!(morsel.stat().pages, stat.pages);
        // Punching makes room.
        morsel.punch(0, 4 * MIB).unwrap();
        assert_eq!(mounted.used(), stat.pages + morsel.stat().tables - 1024);
        assert_eq!(access::store(address, 1), Ok(()));
        let stat = morsel.stat();
        assert_eq!(mounted.used(), stat.pages + stat.tables);
        assert_morsels_are_sound();
        // Another Morsel shares the quota.
        let other = shaped(&mounted, 2, extent(2), 0);
        assert_eq!(other.populate(0, 8 * MIB), Err(Errno::NOSPC));
        let reader = morsel.map(libc::PROT_READ);
        println!("order {order}, flags {flags:#x}: a reader with the quota used up: {reader:?}");
        drop((reader, mapping, morsel));
        other.populate(0, 15 * MIB).unwrap();
        drop(other);
        assert_eq!((mounted.used(), mounted.inodes()), (0, 1), "all is given back");
        mounted.unmount().unwrap();
    }
    before.assert_back();
}

/// A Morsel that a user makes is the user's locked memory, whichever process populates the pages;
/// one that root makes is not.
#[test]
fn what_a_user_makes_is_bounded() {
    let Some(_turn) = morsel_turn() else { return };
    let mounted = Mounted::new("size=64m,mode=1777").unwrap();
    let roots = shaped(&mounted, 2, 16 * MIB, 0);
    for flags in [0, morsel::PINNABLE, morsel::HUGE] {
        in_child(|| {
            become_user(4 * MIB);
            let morsel = shaped(&mounted, 2, 16 * MIB, flags);
            let mapping = morsel.mapped();
            assert_eq!(morsel.populate(0, 16 * MIB), Err(Errno::NOSPC));
            let stat = morsel.stat();
            assert!((1020..=1024).contains(&(stat.pages + stat.tables)), "{stat:?}");
            let address = mapping.page(4000);
            let fault = Fault { signal: libc::SIGBUS, address };
            assert_eq!(access::store(address, 1), Err(fault));
            // The limit holds for all Morsels together, and punching makes room.
            let other = mounted.nameless();
            let shape = plan(2, 16 * MIB, 0);
            let shaped = other.create(&shape);
            assert_eq!(shaped.and_then(|()| other.populate(0, MIB)), Err(Errno::NOSPC));
            morsel.punch(0, 2 * MIB).unwrap();
            // Now there is room for its shape.
            let _ = other.create(&shape);
            other.populate(0, MIB).unwrap();
            // Only the size of the file system limits root's Morsels.
            roots.populate(0, 16 * MIB).unwrap();
            drop((mapping, morsel));
            let kept = File::create_new(mounted.path("kept")).unwrap();
            kept.set_permissions(Permissions::from_mode(0o666)).unwrap();
        });
        // Pages that root populates count for the user, too.
        let kept = OpenOptions::new().read(true).write(true).open(mounted.path("kept")).unwrap();
        let kept = Morsel::from(kept);
        kept.create(&plan(2, 16 * MIB, flags)).unwrap();
        assert_eq!(kept.populate(0, 16 * MIB), Err(Errno::NOSPC));
        drop(kept);
        fs::remove_file(mounted.path("kept")).unwrap();
        roots.punch(0, 16 * MIB).unwrap();
    }
    drop(roots);
    assert_eq!((mounted.used(), mounted.inodes()), (0, 1), "all is given back");
}

/// A reader needs its own tables. The quota has exactly enough for them.
#[test]
fn a_reader_charges_no_more_than_its_tables() {
    let Some(_turn) = morsel_turn() else { return };
    let (pages, tables) = (2, 4);
    let size = (pages + 2 * tables) * PAGE;
    let mounted = Mounted::new(&format!("size={size}")).unwrap();
    let morsel = shaped(&mounted, 3, extent(3), 0);
    for page in [0, 512] {
        morsel.populate(page * PAGE as u64, 1).unwrap();
    }
    assert_eq!(morsel.stat().tables, tables as u64);
    let reader = morsel.map(libc::PROT_READ).unwrap();
    for page in [0, 512] {
        assert_eq!(access::load(reader.page(page)), Ok(0), "page {page}");
    }
    assert_eq!(mounted.used(), (size / PAGE) as u64);
}

/// Every way of freeing returns all memory.
#[test]
fn freed_memory_is_uncharged() {
    let Some(_turn) = morsel_turn() else { return };
    let mounted = Mounted::new("size=64m,inodes=100").unwrap();
    for (order, flags) in kinds() {
        let length = extent(order).min(20 * MIB);
        let morsel = shaped(&mounted, order, length, flags);
        let (mapping, reader) = (morsel.mapped(), morsel.map(libc::PROT_READ).unwrap());
        morsel.populate(0, length).unwrap();
        for page in (0..length / PAGE as u64).step_by(77) {
            access::store(mapping.page(page), 1).unwrap();
            access::load(reader.page(page)).unwrap();
        }
        morsel.punch(length / 2, length / 4).unwrap();
        let stat = morsel.stat();
        assert_eq!(mounted.used(), stat.pages + stat.tables, "{stat:?}");
        if order % 2 == 0 {
            morsel.revoke().unwrap();
            assert_eq!(mounted.used(), stat.tables);
        }
        drop((mapping, reader, morsel));
        assert_eq!((mounted.used(), mounted.inodes()), (0, 1));
    }
    mounted.unmount().unwrap();
}

/// The file system has exactly the space that is needed, and all threads populate at once. No
/// thread is refused because of another thread's page.
#[test]
fn concurrent_populates_are_not_refused() {
    let Some(_turn) = morsel_turn() else { return };
    for (order, flags) in [(1, 0), (1, morsel::PINNABLE), (2, 0), (2, morsel::HUGE), (3, 0)] {
        // Tables first: a populate asks for room for two more when it adds one.
        let tables = [1, 1, 2, 3][order as usize];
        let mounted = Mounted::new(&format!("size={}", (512 + tables) * PAGE)).unwrap();
        for _ in 0..20 {
            let morsel = shaped(&mounted, order, 2 * MIB, flags);
            morsel.populate(0, 1).unwrap();
            let (wait, mut go) = pipe().unwrap();
            let start = |_| {
                Child::start(|| {
                    let mapping = morsel.mapped();
                    (&wait).read_exact(&mut [0]).unwrap();
                    for page in 0..512 {
                        assert_eq!(access::store(mapping.page(page), 1), Ok(()), "page {page}");
                    }
                    0
                })
            };
            let children: Vec<Child> = (0..3).map(start).collect();
            go.write_all(b"!!!").unwrap();
            children.into_iter().for_each(|child| assert_eq!(child.wait(), End::Status(0)));
            assert_eq!(morsel.stat().pages, 512);
        }
    }
}

#[test]
fn the_number_of_names_is_limited() {
    let Some(_turn) = morsel_turn() else { return };
    let mounted = Mounted::new("inodes=5").unwrap();
    let files: Vec<Morsel> = (0..4).map(|_| mounted.nameless()).collect();
    assert_eq!(mounted.inodes(), 5);
    let refused = Morsel::nameless_in(mounted.folder()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    let refused = File::create(mounted.path("one")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    let refused = fs::create_dir(mounted.path("one")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    assert!(fs::read_dir(mounted.folder()).unwrap().next().is_none());
    drop(files);
    assert_eq!(mounted.inodes(), 1);
    fs::create_dir(mounted.path("one")).unwrap();
    File::create(mounted.path("one/two")).unwrap();
    fs::hard_link(mounted.path("one/two"), mounted.path("three")).unwrap();
    assert_eq!(mounted.inodes(), 3, "a second name of the same Morsel");
    // Names end with the file system, and so do their Morsels.
    mounted.unmount().unwrap();
}

#[test]
fn options_are_applied_or_refused() {
    let Some(_turn) = morsel_turn() else { return };
    let total = field("/proc/meminfo", "MemTotal") / 4;
    let blocks = |options: &str| {
        let mounted = Mounted::new(options).unwrap();
        let stat = rustix::fs::statfs(mounted.folder()).unwrap();
        let lines = fs::read_to_string("/proc/mounts").unwrap();
        let folder = mounted.folder().to_str().unwrap();
        let line = lines.lines().find(|line| line.contains(folder)).unwrap().to_owned();
        (stat.f_blocks, stat.f_files, line)
    };
    assert_eq!(blocks("size=1m").0, 256);
    assert_eq!(blocks("size=4096").0, 1);
    assert_eq!(blocks("size=3g,inodes=77").0, 3 << 18);
    assert_eq!(blocks("size=3g,inodes=77").1, 77);
    assert!(blocks("size=3g,inodes=77").2.contains("size=3145728k,inodes=77"));
    for (options, share) in [("", 50), ("size=50%", 50), ("size=10%", 10), ("size=100%", 100)] {
        let found = blocks(options).0;
        assert!(found.abs_diff(total * share / 100) < total / 50, "{options}: {found} of {total}");
    }
    for wrong in [
        "size=",
        "size",
        "size=x",
        "size=0",
        "size=1",
        "size=-1",
        "size=1m1",
        "size=5%%",
        "size=%",
        "inodes=",
        "inodes=x",
        "inodes=-1",
        "inodes=0",
        "mode=9",
        "mode=",
        "uid=x",
        "uid=-1",
        "uid=4294967295",
        "gid=-1",
        "other",
        "other=1",
        "size=1m,other",
    ] {
        assert!(Mounted::new(wrong).is_err(), "{wrong}");
    }
    let mounted = Mounted::new("mode=1750,uid=7,gid=8").unwrap();
    let about = fs::metadata(mounted.folder()).unwrap();
    assert_eq!((about.mode() & 0o7777, about.uid(), about.gid()), (0o1750, 7, 8));
}

/// A remount applies its options, or is refused.
#[test]
fn a_new_size_is_applied_or_refused() {
    let Some(_turn) = morsel_turn() else { return };
    let mounted = Mounted::new("size=16m").unwrap();
    let changed = mounted.change("size=32m");
    let blocks = rustix::fs::statfs(mounted.folder()).unwrap().f_blocks;
    assert!(changed.is_err() || blocks == 8192, "{changed:?}, and there are {blocks}");
}

#[test]
fn it_is_not_unmounted_while_in_use() {
    let Some(_turn) = morsel_turn() else { return };
    let mounted = Mounted::new("size=16m").unwrap();
    let morsel = shaped(&mounted, 2, MIB, 0);
    morsel.stamp(0, 7);
    assert_eq!(mounted.unmount(), Err(Errno::BUSY));
    let mapping = morsel.mapped();
    drop(morsel);
    assert_eq!(mounted.unmount(), Err(Errno::BUSY));
    mapping.assert_stamped(0, 7);
    // The mount point may be removed before the file system.
    drop(mounted);
    mapping.assert_stamped(0, 7);
    assert_eq!(access::store(mapping.page(5), 7), Ok(()));
    drop(mapping);
    // A Morsel that has only a name ends with the file system.
    let before = Memory::now();
    let mounted = Mounted::new("size=64m").unwrap();
    let morsel = Morsel::from(File::create_new(mounted.path("named")).unwrap());
    morsel.create(&plan(2, 32 * MIB, 0)).unwrap();
    morsel.populate(0, 32 * MIB).unwrap();
    drop(morsel);
    mounted.unmount().unwrap();
    before.assert_back();
}

#[test]
fn names_behave_like_file_names() {
    let Some(_turn) = morsel_turn() else { return };
    let mounted = Mounted::new("size=16m").unwrap();
    let path = |name: &str| mounted.path(name);
    let list = |folder: &Path| {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let open = |at: PathBuf| {
        let mut options = OpenOptions::new();
        Morsel::from(options.read(true).write(true).create(true).truncate(false).open(at).unwrap())
    };
    let morsel = open(path("a"));
    morsel.create(&plan(1, MIB, 0)).unwrap();
    morsel.stamp(0, 7);
    let again = OpenOptions::new().write(true).create_new(true).open(path("a")).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    fs::create_dir(path("folder")).unwrap();
    fs::rename(path("a"), path("folder/b")).unwrap();
    open(path("folder/b")).assert_stamped(0, 7);
    fs::hard_link(path("folder/b"), path("c")).unwrap();
    assert_eq!(fs::metadata(path("c")).unwrap().nlink(), 2);
    assert_eq!(
        (list(mounted.folder()), list(&path("folder"))),
        (vec!["c".to_owned(), "folder".to_owned()], vec!["b".to_owned()],)
    );
    assert!(fs::remove_dir(path("folder")).is_err(), "the folder is not empty");
    fs::remove_file(path("folder/b")).unwrap();
    fs::remove_dir(path("folder")).unwrap();
    open(path("c")).assert_stamped(0, 7);
    // A rename replaces another name.
    let other = open(path("d"));
    other.create(&plan(1, MIB, 0)).unwrap();
    other.stamp(0, 8);
    fs::rename(path("d"), path("c")).unwrap();
    open(path("c")).assert_stamped(0, 8);
    morsel.assert_stamped(0, 7);
    drop(morsel);
    assert_eq!(mounted.inodes(), 2);
    // One without a name gets one.
    let nameless = shaped(&mounted, 1, MIB, 0);
    nameless.stamp(0, 9);
    let number = std::os::fd::AsRawFd::as_raw_fd(nameless.file());
    let from = std::ffi::CString::new(format!("/proc/self/fd/{number}")).unwrap();
    let to = std::ffi::CString::new(path("e").to_str().unwrap()).unwrap();
    // SAFETY: the strings end with zeros.
    let linked = unsafe {
        let here = libc::AT_FDCWD;
        libc::linkat(here, from.as_ptr(), here, to.as_ptr(), libc::AT_SYMLINK_FOLLOW)
    };
    assert_eq!(linked, 0, "{}", sys::last_error());
    drop(nameless);
    open(path("e")).assert_stamped(0, 9);
    // No programs, no devices, and no links out of the file system.
    fs::set_permissions(path("e"), Permissions::from_mode(0o777)).unwrap();
    assert!(std::process::Command::new(path("e")).status().is_err());
    assert!(File::open(path("nothing")).is_err());
    drop(other);
    mounted.unmount().unwrap();
}

/// Mode and owner decide, as for any file.
#[test]
fn modes_decide_on_access() {
    let Some(_turn) = morsel_turn() else { return };
    let mounted = Mounted::new("size=16m,mode=0755").unwrap();
    let make = |name: &str, mode: u32| {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(mode);
        let morsel = Morsel::from(file.open(mounted.path(name)).unwrap());
        morsel.create(&plan(1, MIB, 0)).unwrap();
        morsel.stamp(0, 7);
    };
    make("closed", 0o600);
    make("shown", 0o644);
    make("open", 0o644);
    fs::set_permissions(mounted.path("open"), Permissions::from_mode(0o666)).unwrap();
    DirBuilder::new().mode(0o700).create(mounted.path("private")).unwrap();
    in_child(|| {
        become_user(1 << 30);
        let denied = |outcome: std::io::Result<File>| {
            assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EACCES));
        };
        denied(File::create_new(mounted.path("mine")));
        assert!(Morsel::nameless_in(mounted.folder()).is_err());
        assert!(fs::create_dir(mounted.path("mine")).is_err());
        assert!(fs::remove_file(mounted.path("open")).is_err());
        assert!(fs::rename(mounted.path("open"), mounted.path("mine")).is_err());
        denied(File::open(mounted.path("closed")));
        denied(OpenOptions::new().write(true).open(mounted.path("shown")));
        assert!(fs::read_dir(mounted.path("private")).is_err());
        let shown = File::open(mounted.path("shown")).unwrap();
        let shown = Morsel::from(shown);
        shown.map(libc::PROT_READ).unwrap().assert_stamped(0, 7);
        assert!(shown.reopened(true).is_err());
        assert!(fs::set_permissions(mounted.path("shown"), Permissions::from_mode(0o666)).is_err());
        let open = OpenOptions::new().read(true).write(true).open(mounted.path("open")).unwrap();
        let open = Morsel::from(open);
        open.mapped().stamp(0, 8);
        assert_eq!(open.revoke(), Err(Errno::PERM));
    });
}
