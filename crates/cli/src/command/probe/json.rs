//! The findings of the probe as JSON.

use std::fmt::Write;

use vellum_vm::probe::cost::{Cost, Spread};

use super::Findings;

/// One object, on several lines.
pub fn text(findings: &Findings) -> String {
    let facilities = &findings.facilities;
    let list = facilities.list.iter().map(|facility| {
        let (name, reason) = (quoted(facility.name), quoted(&facility.reason));
        format!("{{\"name\": {name}, \"found\": {}, \"reason\": {reason}}}", facility.found)
    });
    let memory = match &findings.memory {
        Ok(limit) => {
            let source = quoted(&limit.source.to_string_lossy());
            format!("{{\"bytes\": {}, \"source\": {source}}}", limit.bytes)
        }
        Err(why) => format!("{{\"error\": {}}}", quoted(why)),
    };
    let files = match &findings.device {
        Ok(info) => {
            let reason = info.direct.as_ref().err().map_or("null".into(), |why| quoted(why));
            let (engine, direct) = (quoted(info.engine), info.direct.is_ok());
            format!("{{\"engine\": {engine}, \"direct\": {direct}, \"reason\": {reason}}}")
        }
        Err(why) => format!("{{\"error\": {}}}", quoted(why)),
    };
    let morsels = findings.morsels.iter().map(|probe| {
        let (Ok(reason) | Err(reason)) = &probe.found;
        let (name, found) = (quoted(probe.backend.name()), probe.found.is_ok());
        format!("{{\"name\": {name}, \"found\": {found}, \"reason\": {}}}", quoted(reason))
    });
    let ratios = super::OTHERS.map(|other| {
        let ratios = [1, 2].into_iter().filter_map(|threads| {
            let (populate, release) = findings.ratio(threads, other)?;
            let both = format!("\"populate\": {populate:.2}, \"release\": {release:.2}");
            Some(format!("{{\"threads\": {threads}, {both}}}"))
        });
        format!("\"madvise_over_{other}\": {}", array(ratios))
    });
    let choice = &facilities.choice;
    let (backend, reason) = (quoted(choice.backend.name()), quoted(&choice.reason));
    format!(
        "{{\n  \"kernel\": {},\n  \"memory\": {memory},\n  \"files\": {files},\n  \
         \"backend\": {{\"name\": {backend}, \"reason\": {reason}}},\n  \"morsels\": {},\n  \
         \"facilities\": {},\n  \"costs\": {},\n  {}\n}}",
        quoted(&facilities.kernel_release),
        array(morsels),
        array(list),
        array(findings.costs.iter().map(cost)),
        ratios.join(",\n  "),
    )
}

fn cost(cost: &Cost) -> String {
    let setting = &cost.setting;
    format!(
        "{{\"backend\": {}, \"threads\": {}, \"pages\": {}, \"batch\": {}, \"rounds\": {}, \
         \"populate_ns\": {}, \"release_ns\": {}}}",
        quoted(cost.backend.name()),
        setting.threads,
        setting.pages,
        setting.batch,
        setting.rounds,
        spread(cost.populate_ns),
        spread(cost.release_ns),
    )
}

fn spread(spread: Spread) -> String {
    let Spread { median, min, max } = spread;
    format!("{{\"median\": {median:.1}, \"min\": {min:.1}, \"max\": {max:.1}}}")
}

fn array(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() { "[]".into() } else { format!("[\n    {}\n  ]", items.join(",\n    ")) }
}

/// A string of JSON.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            '\0'..='\x1f' => {
                // Writing to a string cannot fail.
                let _ = write!(quoted, "\\u{:04x}", u32::from(letter));
            }
            _ => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_escaped() {
        assert_eq!(quoted("a\"b\\c\né"), "\"a\\\"b\\\\c\\u000aé\"");
        assert_eq!(array(["1".to_string(), "2".to_string()].into_iter()), "[\n    1,\n    2\n  ]");
        assert_eq!(array(std::iter::empty()), "[]");
    }
}
