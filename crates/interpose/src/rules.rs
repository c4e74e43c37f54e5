//! The rules that say which files are taken.

use std::ffi::CStr;

/// Which files are taken.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Rules {
    patterns: Vec<String>,
    minimum: Option<u64>,
}

impl Rules {
    /// The variables that say which files are taken through a cache: the patterns, and the least
    /// length.
    pub const OF_CACHES: [&CStr; 2] = [c"VELLUM_AQUILA", c"VELLUM_AQUILA_MIN"];
    /// Those that say which files are taken as Morsels.
    pub const OF_MORSELS: [&CStr; 2] = [c"VELLUM_PRELOAD", c"VELLUM_PRELOAD_MIN"];

    /// The rules in two variables of the environment.
    pub fn of_environment(variables: [&CStr; 2]) -> Self {
        let [files, minimum] = variables.map(|name| {
            let value = name.to_str().ok().and_then(|name| std::env::var(name).ok());
            value.unwrap_or_default()
        });
        Self::new(&files, &minimum)
    }

    /// Rules of patterns of paths, with colons between them, and of the bytes from which on a file
    /// is taken at any path. An empty text is no rule, and without rules no file is taken.
    pub fn new(files: &str, minimum: &str) -> Self {
        let patterns = files.split(':').filter(|pattern| !pattern.is_empty());
        Self { patterns: patterns.map(str::to_owned).collect(), minimum: minimum.parse().ok() }
    }

    /// Whether no file is taken.
    pub fn are_none(&self) -> bool {
        self.patterns.is_empty() && self.minimum.is_none()
    }

    /// Whether a file of this length is taken; its path is asked for only if that matters.
    pub fn take(&self, length: u64, path: impl FnOnce() -> Option<Vec<u8>>) -> bool {
        if self.minimum.is_some_and(|minimum| length >= minimum) {
            return true;
        }
        if self.patterns.is_empty() {
            return false;
        }
        path().is_some_and(|path| {
            self.patterns.iter().any(|pattern| matches(pattern.as_bytes(), &path))
        })
    }
}

/// Whether a path matches a pattern: `*` stands for any bytes, `?` for one.
fn matches(pattern: &[u8], path: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    // Where to go on if a star must stand for one byte more.
    let mut star = None;
    while from < path.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, from));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == path[from] => {
                at += 1;
                from += 1;
            }
            _ => match star {
                Some((place, taken)) => {
                    star = Some((place, taken + 1));
                    at = place + 1;
                    from = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_of_whole_paths() {
        let good = [
            ("/models/a.gguf", "/models/a.gguf"),
            ("*.gguf", "/models/a.gguf"),
            ("/models/*", "/models/deep/a"),
            ("/m*s/?.gg*f", "/models/a.gguf"),
            ("*a*b*", "/a/a/b"),
            ("**", ""),
        ];
        for (pattern, path) in good {
            assert!(matches(pattern.as_bytes(), path.as_bytes()), "{pattern} {path}");
        }
        let bad = [("a", "/a"), ("/a", "/ab"), ("*.gguf", "/a.gguf2"), ("?", ""), ("*a*b", "/b/a")];
        for (pattern, path) in bad {
            assert!(!matches(pattern.as_bytes(), path.as_bytes()), "{pattern} {path}");
        }
        let many = "*a".repeat(200);
        assert!(!matches(many.as_bytes(), "a".repeat(199).as_bytes()));
    }

    #[test]
    fn files_are_taken_by_path_or_length() {
        let path = || Some(b"/m/a.gguf".to_vec());
        assert!(Rules::new("", "").are_none());
        assert!(Rules::new("", "many").are_none());
        assert!(!Rules::new("", "").take(u64::MAX, path));
        assert!(Rules::new("/x:*.gguf", "").take(1, path));
        assert!(!Rules::new("/x:/y", "").take(1, path));
        assert!(!Rules::new("*", "").take(1, || None));
        let long = Rules::new("", "1000");
        assert!(long.take(1000, || None) && !long.take(999, path));
    }
}
