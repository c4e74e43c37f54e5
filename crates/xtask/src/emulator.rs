//! The lab's emulator. Debian 12 has an unsound one, and a sound one in its backports.

use std::fs;
use std::process::Command;

use crate::packages::{apt_get, is_root, major_and_minor, on_path};
use crate::workspace::Outcome;

/// The program.
const EMULATOR: &str = "qemu-system-x86_64";

/// Older versions do not know all properties of the lab's processor. They are unsound, too: if a
/// kernel changes code while several processors run it, a processor sometimes executes the old code
/// or hangs.
const SOUND: (u32, u32) = (8, 1);

/// The suite of Debian 12 that has it.
const BACKPORTS: &str = "bookworm-backports";
const PACKAGE: &str = "qemu-system-x86";

/// Makes sure that the machine has a sound emulator, or on Debian 12 installs one. Elsewhere the
/// distribution's is sound.
///
/// # Errors
/// If it cannot; with the command that installs one.
pub fn ensure() -> Outcome {
    let version = version();
    if version.is_some_and(|version| version >= SOUND) || !is_debian_12() {
        return Ok(());
    }
    if !is_root() || !on_path("apt-get") {
        return Err(format!(
            "the lab needs {EMULATOR} 8.1 or newer; run: sudo apt-get install -y -t {BACKPORTS} \
             {PACKAGE}"
        ));
    }
    println!("installing {PACKAGE} from {BACKPORTS}");
    install()
}

/// Installs it without a change to the machine's list of sources.
fn install() -> Outcome {
    let folder = std::env::temp_dir().join(format!("vellum-apt-{}", std::process::id()));
    let list = folder.join("sources.list");
    let mirror = |suite| format!("deb http://deb.debian.org/debian {suite} main\n");
    let sources = mirror("bookworm") + &mirror(BACKPORTS);
    fs::create_dir_all(folder.join("lists/partial"))
        .and_then(|()| fs::write(&list, sources))
        .map_err(|error| format!("{}: {error}", folder.display()))?;
    let options = [
        format!("-oDir::Etc::sourcelist={}", list.display()),
        "-oDir::Etc::sourceparts=-".to_owned(),
        format!("-oDir::State::lists={}", folder.join("lists").display()),
    ];
    let with = |arguments: &[&'static str]| {
        let options = options.iter().map(String::as_str);
        apt_get(&options.chain(arguments.iter().copied()).collect::<Vec<_>>())
    };
    let installed = with(&["update"]).and_then(|()| {
        with(&["install", "-y", "--no-install-recommends", "-t", BACKPORTS, PACKAGE])
    });
    // Remains of the folder do no harm.
    let _removed = fs::remove_dir_all(&folder);
    installed
}

fn version() -> Option<(u32, u32)> {
    let output = Command::new(EMULATOR).arg("--version").output().ok()?;
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// Major and minor number of text such as `QEMU emulator version 10.0.2 (Debian ...)`.
fn parse(text: &str) -> Option<(u32, u32)> {
    major_and_minor(text.split_once("version ")?.1.split_whitespace().next()?)
}

fn is_debian_12() -> bool {
    let about = fs::read_to_string("/etc/os-release").unwrap_or_default();
    about.lines().any(|line| line == "VERSION_CODENAME=bookworm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let version = |number| parse(&format!("QEMU emulator version {number} (Debian 1:x)\nC"));
        assert_eq!(version("7.2.22"), Some((7, 2)));
        assert!(version("7.2.22").unwrap() < SOUND);
        assert!(version("8.1.0").unwrap() >= SOUND && version("10.0.2").unwrap() >= SOUND);
        assert_eq!(parse("not an emulator"), None);
    }
}
