//! Debian's packages and their dependencies: a real graph.

use std::collections::HashMap;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::Graph;

/// The installed packages, if there is no list of all packages.
const STATUS: &str = "/var/lib/dpkg/status";

/// The graph of the packages that this machine knows, and their source.
///
/// # Errors
/// Where there is no Debian.
pub fn read() -> Result<(Graph, String)> {
    let available = Command::new("apt-cache").arg("dumpavail").output();
    if let Ok(output) = available
        && output.status.success()
    {
        let graph = parse(&String::from_utf8_lossy(&output.stdout));
        if graph.edges() > 0 {
            return Ok((graph, "apt-cache dumpavail".to_owned()));
        }
    }
    let status = fs::read_to_string(STATUS).with_context(|| format!("no packages: {STATUS}"))?;
    let graph = parse(&status);
    if graph.edges() == 0 {
        bail!("{STATUS} names no dependencies");
    }
    Ok((graph, STATUS.to_owned()))
}

/// Parses paragraphs with the fields Package, Depends and Pre-Depends. All alternatives count.
/// Virtual packages, which are only dependencies, are vertices, too. Edges go both ways, to the
/// packages that a package needs and to those that need it, so nearly all packages are reachable
/// from each.
fn parse(text: &str) -> Graph {
    let mut numbers: HashMap<&str, u32> = HashMap::new();
    let mut number = |name| {
        let next = numbers.len() as u32;
        *numbers.entry(name).or_insert(next)
    };
    let (mut edges, mut package) = (Vec::new(), None);
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("Package: ") {
            package = Some(number(name.trim()));
            continue;
        }
        let depends = line.strip_prefix("Depends: ").or(line.strip_prefix("Pre-Depends: "));
        if let (Some(from), Some(depends)) = (package, depends) {
            for name in names(depends) {
                let to = number(name);
                edges.extend([(from, to), (to, from)]);
            }
        }
    }
    let vertices = numbers.len();
    Graph::of_edges(vertices, edges)
}

/// The names in a list such as `a (>= 1.0), b:any | c [amd64]`.
fn names(list: &str) -> impl Iterator<Item = &str> {
    list.split([',', '|']).filter_map(|entry| {
        let name = entry.split_whitespace().next()?;
        name.split(':').next().filter(|name| !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_edges() {
        let text = "Package: a\nVersion: 1\nDepends: b (>= 2), c:any | d\n\n\
                    Package: b\nPre-Depends: a\nDescription: Depends: no\n";
        let graph = parse(text);
        assert_eq!((graph.vertices(), graph.edges()), (4, 6));
        assert_eq!(graph.neighbours(0), [1, 2, 3]);
        assert_eq!(graph.neighbours(1), [0]);
        assert_eq!(graph.neighbours(3), [0]);
    }
}
