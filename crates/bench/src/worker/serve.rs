//! The worker: it answers requests one by one until there are no more.

use std::io::{self, BufRead, Write};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::message::{GREETING, Request, Response, Usage};
use super::whole_file::{Held, Weight};
use crate::engine::{Engine, Engines, Factory};
use crate::machine;

/// Serves requests from standard input, with Vellum and `peers`, until the input ends.
///
/// # Errors
/// If the parent cannot be reached. The worker reports errors of an engine to the parent.
pub fn main(peers: &[Factory]) -> Result<()> {
    // The kernel kills this process with its parent, because the input does not end while a dying
    // parent is stuck in the kernel.
    set_parent_process_death_signal(Some(Signal::KILL)).context("binding this to its parent")?;
    serve(&Engines::new(peers), &mut io::stdin().lock(), &mut io::stdout().lock())
}

fn serve(engines: &Engines, input: &mut dyn BufRead, output: &mut dyn Write) -> Result<()> {
    let mut say = |line: &str| -> Result<()> {
        writeln!(output, "{line}")?;
        Ok(output.flush()?)
    };
    say(GREETING)?;
    let mut engine = None;
    let mut held = None;
    let mut line = String::new();
    while input.read_line(&mut line)? > 0 {
        let result = match serde_json::from_str(&line) {
            Ok(Request::Keep) => {
                say(&serde_json::to_string(&Response::Done)?)?;
                return keep(input);
            }
            Ok(request) => answer(engines, &mut engine, &mut held, request),
            Err(error) => Err(error).with_context(|| format!("not a request: {}", line.trim_end())),
        };
        let response = result.unwrap_or_else(|error| Response::Failed(format!("{error:#}")));
        say(&serde_json::to_string(&response)?)?;
        line.clear();
    }
    Ok(())
}

fn answer(
    engines: &Engines,
    open: &mut Option<Box<dyn Engine>>,
    held: &mut Option<Held>,
    request: Request,
) -> Result<Response> {
    let engine = || match open.as_deref() {
        Some(engine) => Ok(engine),
        None => bail!("no engine is open"),
    };
    match request {
        Request::Open { engine, setting } => {
            if open.is_some() {
                bail!("an engine is open already");
            }
            *open = Some((engines.get(&engine)?.open)(&setting)?);
        }
        Request::Load(workload) => workload.work().load(engine()?)?,
        Request::Settle => engine()?.settle()?,
        Request::Run(workload, plan) => {
            return Ok(Response::Ran(workload.work().run(engine()?, &plan)?));
        }
        Request::Check(workload) => {
            return Ok(Response::Checked(workload.work().check(engine()?)?));
        }
        Request::Usage => return Ok(Response::Used(Usage::of("self"))),
        Request::Close => *open = None,
        Request::Hold(method, path) => {
            return Ok(Response::Held(held.insert(Held::get(&method, &path)?).sum()?));
        }
        Request::Access(plan) => {
            let held = held.as_ref().context("no file is held")?;
            return Ok(Response::Ran(held.access(&plan)?));
        }
        Request::Fetch(site, plan) => return Ok(Response::Ran(site.fetch(&plan)?)),
        Request::Stage(stage) => stage.run()?,
        Request::Weigh => return Ok(Response::Weighs(Weight::now())),
        Request::LetGo => *held = None,
        // This request ends the loop, so the caller handles it.
        Request::Keep => {}
    }
    Ok(Response::Done)
}

/// Outlives the parent until it has removed the parent's remains. A parent that ends normally kills
/// its cleaner first.
fn keep(input: &mut dyn BufRead) -> Result<()> {
    set_parent_process_death_signal(None).context("outliving the parent")?;
    let parent = getppid();
    let mut rest = Vec::new();
    input.read_to_end(&mut rest)?;
    // A dying parent first closes its files and then ends. Until it has ended, its devices and
    // groups belong to it.
    while getppid() == parent {
        thread::sleep(Duration::from_millis(10));
    }
    machine::remove_leftovers();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Setting;
    use crate::workload::{Lookup, Plan, Workload};

    fn conversation(requests: &[String]) -> Vec<String> {
        let input = requests.concat();
        let mut output = Vec::new();
        serve(&Engines::new(&[]), &mut input.as_bytes(), &mut output).unwrap();
        let lines = String::from_utf8(output).unwrap();
        let mut lines: Vec<String> = lines.lines().map(str::to_owned).collect();
        assert_eq!(lines.remove(0), GREETING);
        lines
    }

    fn line(request: &Request) -> String {
        serde_json::to_string(request).unwrap() + "\n"
    }

    fn open(engine: &str, directory: &std::path::Path) -> Request {
        Request::Open { engine: engine.to_owned(), setting: Setting::new(directory, 2 << 20) }
    }

    #[test]
    fn an_engine_is_opened_filled_and_run() {
        let directory = tempfile::tempdir().unwrap();
        let workload = Workload::Lookup(Lookup { entries: 1000, batch: 1 });
        let plan = Plan { threads: 1, seconds: 0.1, seed: 1 };
        let answers = conversation(&[
            line(&open("vellum", directory.path())),
            line(&Request::Load(workload.clone())),
            line(&Request::Settle),
            line(&Request::Run(workload.clone(), plan)),
            line(&Request::Check(workload)),
            line(&Request::Usage),
            line(&Request::Close),
            line(&open("vellum", directory.path())),
        ]);
        let answers: Vec<Response> =
            answers.iter().map(|answer| serde_json::from_str(answer).unwrap()).collect();
        let [Response::Done, Response::Done, Response::Done, Response::Ran(measured), rest @ ..] =
            &answers[..]
        else {
            panic!("{answers:?}");
        };
        assert!(measured.operations > 100);
        assert!(matches!(rest[0], Response::Checked(_)) && matches!(rest[1], Response::Used(_)));
        assert_eq!(rest[2..], [Response::Done, Response::Done]);
    }

    #[test]
    fn what_cannot_be_done_is_told_and_the_worker_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let workload = Workload::Lookup(Lookup { entries: 1000, batch: 1 });
        let answers = conversation(&[
            "no json\n".to_owned(),
            "{\"Dance\":1}\n".to_owned(),
            line(&Request::Settle),
            line(&open("oracle", directory.path())),
            line(&open("vellum", &directory.path().join("none"))),
            line(&open("vellum", directory.path())),
            line(&open("vellum", directory.path())),
            line(&Request::Run(workload, Plan { threads: 1, seconds: 0.1, seed: 1 })),
            line(&Request::Usage),
        ]);
        let expected = [
            "not a request: no json",
            "not a request",
            "no engine is open",
            "no engine 'oracle' here, only vellum",
            "Failed",
            "Done",
            "an engine is open already",
            "gave a wrong value or none",
            "Used",
        ];
        assert_eq!(answers.len(), expected.len());
        for (answer, expected) in answers.iter().zip(expected) {
            assert!(answer.contains(expected), "{answer}, not {expected}");
        }
    }
}
