//! Where this machine allows new memory cgroups, and by which of the kernel's two interfaces.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// The interface of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// One hierarchy per controller.
    One,
    /// One hierarchy for all.
    Two,
}

/// The place for new groups.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hierarchy {
    pub(super) version: Version,
    /// The parent of new groups.
    pub(super) parent: PathBuf,
}

impl Hierarchy {
    /// The place for new groups, as close to the group of this process as the kernel allows.
    ///
    /// # Errors
    /// Without a memory controller, or without the right to create groups.
    pub(super) fn find() -> Result<Hierarchy> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        if let Some(root) = mount_point(&mounts, "cgroup", Some("memory")) {
            let parent = below(&root, own_group(&groups, Some("memory")));
            return Ok(Hierarchy { version: Version::One, parent });
        }
        let Some(root) = mount_point(&mounts, "cgroup2", None) else {
            bail!("no memory cgroups: the kernel's memory controller is not mounted");
        };
        let own = below(&root, own_group(&groups, None));
        // A group with processes cannot give controllers to child groups, so the place is mostly a
        // parent of the process' group.
        match own
            .ancestors()
            .take_while(|group| group.starts_with(&root))
            .find(|group| gives(group))
        {
            Some(parent) => Ok(Hierarchy { version: Version::Two, parent: parent.to_owned() }),
            None => bail!(
                "no memory cgroups: no group from {} upwards gives the memory controller to new \
                 groups (run as root, or in a delegated group)",
                own.display()
            ),
        }
    }
}

/// The mount point of a hierarchy: that of `controller`, or the one of version 2.
fn mount_point(mounts: &str, kind: &str, controller: Option<&str>) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let options = (after.next()? == kind).then(|| after.next_back())??;
        let fits = controller.is_none_or(|name| options.split(',').any(|option| option == name));
        fits.then(|| before.split(' ').nth(4).map(PathBuf::from))?
    })
}

/// The group that this process is in, as a path below the mount point.
fn own_group<'a>(groups: &'a str, controller: Option<&str>) -> &'a str {
    let group = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let fits = match controller {
            Some(name) => controllers.split(',').any(|each| each == name),
            None => controllers.is_empty(),
        };
        fits.then_some(path)
    });
    group.unwrap_or("/")
}

/// In a container the kernel may show the group's path as seen from outside. Then this is the mount
/// point, which always exists.
fn below(root: &Path, group: &str) -> PathBuf {
    let path = root.join(group.trim_start_matches('/'));
    if path.is_dir() { path } else { root.to_owned() }
}

/// Whether new groups in this one get the memory controller, already or after a write.
fn gives(group: &Path) -> bool {
    let control = group.join("cgroup.subtree_control");
    let has = || {
        let given = fs::read_to_string(&control).unwrap_or_default();
        given.split_whitespace().any(|name| name == "memory")
    };
    has() || (fs::write(&control, "+memory").is_ok() && has())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw
";

    #[test]
    fn the_mount_point_is_found() {
        let found = |kind, controller| mount_point(MOUNTS, kind, controller);
        assert_eq!(found("cgroup", Some("memory")), Some("/sys/fs/cgroup/memory".into()));
        assert_eq!(found("cgroup2", None), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(found("cgroup", Some("memor")), None);
    }

    #[test]
    fn the_own_group_is_found() {
        let groups = "8:pids:/a\n4:cpu,memory:/b/c:d\n0::/e\n";
        assert_eq!(own_group(groups, Some("memory")), "/b/c:d");
        assert_eq!(own_group(groups, None), "/e");
        assert_eq!(own_group("", None), "/");
    }

    #[test]
    fn a_group_that_is_not_seen_from_here_is_the_mount_point() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        assert_eq!(below(root.path(), "/a"), root.path().join("a"));
        assert_eq!(below(root.path(), "/a/b"), root.path());
    }

    #[test]
    fn a_group_gives_what_it_may_give() {
        let group = tempfile::tempdir().unwrap();
        let control = group.path().join("cgroup.subtree_control");
        fs::write(&control, "cpu memory\n").unwrap();
        assert!(gives(group.path()));
        fs::remove_file(&control).unwrap();
        fs::create_dir(&control).unwrap();
        assert!(!gives(group.path()));
    }
}
