//! The messages between a worker and its parent.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::pipeline::Stage;
use super::web_client::Site;
use super::whole_file::{LoadMethod, Weight};
use crate::engine::Setting;
use crate::machine::kib;
use crate::workload::{Measured, Plan, Workload};

/// The end of a worker's first line. Output before it is not the worker's, because the launcher of
/// the program may print something.
pub const GREETING: &str = "vellum bench worker 1";

/// A request to a worker. It answers each request before it reads the next one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Open an engine by name. No engine is open.
    Open {
        /// Its name.
        engine: String,
        /// How.
        setting: Setting,
    },
    /// Fill it.
    Load(Workload),
    /// Write everything, and finish pending work.
    Settle,
    /// Run operations.
    Run(Workload, Plan),
    /// Check the conditions that must hold after runs.
    Check(Workload),
    /// Report the resources of this process.
    Usage,
    /// Close the engine.
    Close,
    /// Get a file, access all of its pages, and keep it.
    Hold(LoadMethod, PathBuf),
    /// Access pages of the file that it holds, at random.
    Access(Plan),
    /// Fetch pages from a web server.
    Fetch(Site, Plan),
    /// Be a step of a pipeline, until no more packets come.
    Stage(Stage),
    /// Report the memory of this process.
    Weigh,
    /// Drop the file.
    LetGo,
    /// Wait until the parent ends, then remove the remains of killed processes.
    Keep,
}

/// A response of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Response {
    /// Done.
    Done,
    /// The result of a run.
    Ran(Measured),
    /// The names of the checked conditions.
    Checked(Vec<String>),
    /// The resources of this process.
    Used(Usage),
    /// The sum of the file.
    Held(u64),
    /// The memory of this process.
    Weighs(Weight),
    /// Why the request failed. The worker goes on.
    Failed(String),
}

/// The resources of a process, and its work so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of resident memory, with shared memory and mapped files.
    pub resident: u64,
    /// Bytes that it made the kernel read from devices since it began.
    pub read: u64,
    /// Bytes that it gave the kernel to write to devices since it began.
    pub written: u64,
}

impl Usage {
    /// The usage of a running process, given by its number or as `self`. Values that cannot be read
    /// are 0.
    pub fn of(process: &str) -> Usage {
        let io = fs::read_to_string(format!("/proc/{process}/io")).unwrap_or_default();
        let field = |name: &str| {
            let value = io.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
            value.unwrap_or(0)
        };
        Usage {
            resident: kib(&format!("/proc/{process}/status"), "VmRSS").unwrap_or(0) * 1024,
            read: field("read_bytes:"),
            written: field("write_bytes:"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_responses_survive_a_line() {
        let setting = Setting::new(std::path::Path::new("a b"), 1 << 20);
        let open = Request::Open { engine: "vellum".to_owned(), setting };
        let line = serde_json::to_string(&open).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(
            format!("{:?}", serde_json::from_str::<Request>(&line).unwrap()),
            format!("{open:?}")
        );
        let failed = Response::Failed("two\nlines".to_owned());
        let line = serde_json::to_string(&failed).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Response>(&line).unwrap(), failed);
    }

    #[test]
    fn this_process_uses_memory() {
        assert!(Usage::of("self").resident > 1 << 20);
        assert_eq!(Usage::of("0"), Usage::default());
    }
}
