//! How much memory this process may use: the least of physical memory and the limits of the
//! memory control groups above it.
//!
//! A group's limit binds everything below it, so this module walks the groups from the process's
//! own up to the top of the mount: `memory.max` in cgroup version 2, `memory.limit_in_bytes` in
//! version 1. Inside a container the mount usually shows only the container's own part of the
//! hierarchy; the limit is then at its top.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// A limit and where it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes that the process may use, its share of the page cache included.
    pub bytes: u64,
    /// The file that says so, e.g. `/sys/fs/cgroup/user.slice/memory.max`.
    pub source: PathBuf,
}

/// The limit that binds this process now. Limits may be changed while it runs.
///
/// # Errors
/// If `/proc/meminfo` cannot be read or parsed. Control groups that cannot be read do not count:
/// the kernel lets every process read its own.
pub fn effective() -> io::Result<MemoryLimit> {
    effective_under(Path::new("/"))
}

/// [`effective`] on a copy of the files below `root`.
fn effective_under(root: &Path) -> io::Result<MemoryLimit> {
    let source = PathBuf::from("/proc/meminfo");
    let text = fs::read_to_string(below(root, &source))?;
    let bytes = parse_meminfo(&text).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemTotal in kB")
    })?;
    let mut least = MemoryLimit { bytes, source };
    let read = |path: &str| fs::read_to_string(below(root, Path::new(path))).unwrap_or_default();
    let mounts = parse_mountinfo(&read("/proc/self/mountinfo"));
    for group in parse_cgroups(&read("/proc/self/cgroup")) {
        let Some(mount) = mounts.iter().find(|mount| mount.version == group.version) else {
            continue;
        };
        for directory in directories(mount, &group.path) {
            let source = directory.join(group.version.limit_file());
            let text = fs::read_to_string(below(root, &source)).unwrap_or_default();
            match text.trim().parse() {
                Ok(bytes) if bytes < least.bytes => least = MemoryLimit { bytes, source },
                // No such file, or "max", or more than another limit.
                _ => {}
            }
        }
    }
    Ok(least)
}

/// An absolute path as seen from `root`.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The two kinds of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// The file that holds the limit of a group, in bytes.
    fn limit_file(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }
}

/// A group that this process is in, among those that can limit memory.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    version: Version,
    /// From the root of the hierarchy.
    path: PathBuf,
}

/// Where a hierarchy of groups is mounted.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group that the mount shows at its top.
    root: PathBuf,
    /// Its mount point.
    point: PathBuf,
}

/// The directories of a group and of those above it that the mount shows, innermost first.
fn directories(mount: &Mount, group: &Path) -> Vec<PathBuf> {
    // If the group is outside the mount (a container that sees the host's paths), only the top of
    // the mount counts.
    let inside = group.strip_prefix(&mount.root).unwrap_or(Path::new(""));
    let inside = if inside.components().any(|part| part == Component::ParentDir) {
        Path::new("")
    } else {
        inside
    };
    inside.ancestors().map(|part| mount.point.join(part)).collect()
}

/// `MemTotal` of `/proc/meminfo`, in bytes.
fn parse_meminfo(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The groups of `/proc/self/cgroup` (lines `id:controllers:path`) that can limit memory.
fn parse_cgroups(text: &str) -> Vec<Group> {
    let group = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let version = if id == "0" && controllers.is_empty() {
            Version::Two
        } else if controllers.split(',').any(|name| name == "memory") {
            Version::One
        } else {
            return None;
        };
        Some(Group { version, path: PathBuf::from(path) })
    };
    text.lines().filter_map(group).collect()
}

/// The mounts of `/proc/self/mountinfo` that show groups which can limit memory.
///
/// A line is `id parent device root point options [optional...] - type source super-options`.
fn parse_mountinfo(text: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (front, back) = line.split_once(" - ")?;
        let mut back = back.split(' ');
        let (kind, _, options) = (back.next()?, back.next()?, back.next().unwrap_or(""));
        let version = match kind {
            "cgroup2" => Version::Two,
            "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
            _ => return None,
        };
        let mut front = front.split(' ').skip(3);
        let (root, point) = (unescape(front.next()?), unescape(front.next()?));
        Some(Mount { version, root: root.into(), point: point.into() })
    };
    text.lines().filter_map(mount).collect()
}

/// Undoes the kernel's `\ooo` for spaces, tabs, line ends and backslashes.
fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        plain.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|octal| u8::from_str_radix(octal, 8).ok());
        match code {
            Some(byte) => {
                plain.push(char::from(byte));
                rest = &rest[at + 4..];
            }
            None => {
                plain.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: &str = "MemTotal:       16384 kB\nMemFree:        1 kB\n";
    const TOTAL_BYTES: u64 = 16 << 20;

    /// A root directory that holds the given files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = below(root.path(), Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn limit(files: &[(&str, &str)]) -> (u64, String) {
        let limit = effective_under(root(files).path()).unwrap();
        (limit.bytes, limit.source.to_str().unwrap().to_owned())
    }

    const V2_MOUNT: &str = "24 1 0:1 / /proc rw - proc proc rw\n\
        31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1_MOUNT: &str = "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw shared:1 master:2 - cgroup cgroup rw,memory\n";

    #[test]
    fn without_groups_physical_memory_is_the_limit() {
        assert_eq!(limit(&[("/proc/meminfo", TOTAL)]), (TOTAL_BYTES, "/proc/meminfo".into()));
    }

    #[test]
    fn version_2_takes_the_least_on_the_way_up() {
        let files = |inner, outer| {
            [
                ("/proc/meminfo", TOTAL),
                ("/proc/self/cgroup", "0::/user.slice/shell\n"),
                ("/proc/self/mountinfo", V2_MOUNT),
                ("/sys/fs/cgroup/user.slice/shell/memory.max", inner),
                ("/sys/fs/cgroup/user.slice/memory.max", outer),
                ("/sys/fs/cgroup/other/memory.max", "1\n"),
            ]
        };
        let outer = "/sys/fs/cgroup/user.slice/memory.max";
        let inner = "/sys/fs/cgroup/user.slice/shell/memory.max";
        assert_eq!(limit(&files("max\n", "8000000\n")), (8_000_000, outer.into()));
        assert_eq!(limit(&files("4000000\n", "8000000\n")), (4_000_000, inner.into()));
        assert_eq!(limit(&files("max\n", "max\n")).0, TOTAL_BYTES);
        assert_eq!(limit(&files("99999999999\n", "")).0, TOTAL_BYTES);
    }

    #[test]
    fn version_1_is_walked_too_and_its_huge_default_is_no_limit() {
        let files = |value| {
            [
                ("/proc/meminfo", TOTAL),
                ("/proc/self/cgroup", "9:name=systemd:/\n4:hugetlb,memory:/job\n0::/\n"),
                ("/proc/self/mountinfo", V1_MOUNT),
                ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", value),
                ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ]
        };
        let source = "/sys/fs/cgroup/memory/job/memory.limit_in_bytes";
        assert_eq!(limit(&files("5000000\n")), (5_000_000, source.into()));
        assert_eq!(limit(&files("9223372036854771712\n")).0, TOTAL_BYTES);
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_top_of_the_mount() {
        let mount = "31 23 0:28 /docker/abc /sys/fs/cg\\040roup ro - cgroup2 cgroup rw\n";
        let files = |group| {
            [
                ("/proc/meminfo", TOTAL),
                ("/proc/self/cgroup", group),
                ("/proc/self/mountinfo", mount),
                ("/sys/fs/cg roup/memory.max", "3000000"),
                ("/sys/fs/cg roup/inner/memory.max", "2000000"),
            ]
        };
        let top = "/sys/fs/cg roup/memory.max".to_owned();
        assert_eq!(limit(&files("0::/docker/abc\n")), (3_000_000, top.clone()));
        assert_eq!(limit(&files("0::/docker/abc/inner\n")).0, 2_000_000);
        assert_eq!(limit(&files("0::/elsewhere\n")), (3_000_000, top.clone()));
        assert_eq!(limit(&files("0::/docker/abc/../xyz\n")), (3_000_000, top));
    }

    #[test]
    fn broken_files_are_an_error_or_no_limit() {
        let missing = effective_under(root(&[]).path()).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let odd = effective_under(root(&[("/proc/meminfo", "MemTotal: much\n")]).path());
        assert_eq!(odd.unwrap_err().kind(), io::ErrorKind::InvalidData);
        let files = [
            ("/proc/meminfo", TOTAL),
            ("/proc/self/cgroup", "\n0\n::\n0::\n4:memory\n"),
            ("/proc/self/mountinfo", "31 - cgroup2\n - cgroup2 a b\nx"),
        ];
        assert_eq!(limit(&files).0, TOTAL_BYTES);
        assert_eq!(unescape(r"a\040b\134c\9d\"), r"a b\c\9d\");
    }

    #[test]
    fn this_machine_has_a_limit() {
        let limit = effective().unwrap();
        assert!(limit.bytes >= 16 << 20, "{limit:?}");
        assert!(limit.source.exists(), "{limit:?}");
    }
}
