//! Alternating measurements, A B C A B C: each round measures each contestant once.

use std::fmt;

use anyhow::{Context as _, Result};

use super::Samples;
use crate::progress::Progress;

/// Something that can be measured again and again.
pub struct Contestant<'a> {
    name: String,
    measure: Box<dyn FnMut() -> Result<f64> + 'a>,
}

impl<'a> Contestant<'a> {
    /// A contestant whose `measure` returns one sample.
    pub fn new(name: impl Into<String>, measure: impl FnMut() -> Result<f64> + 'a) -> Self {
        Contestant { name: name.into(), measure: Box::new(measure) }
    }
}

impl fmt::Debug for Contestant<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Contestant({})", self.name)
    }
}

/// Measures all contestants `rounds` times, one after the other in each round. One round before
/// does not count. Every second round has the reverse order, so that no contestant always comes
/// first.
///
/// # Errors
/// The first that a contestant returns.
pub fn alternate(
    rounds: usize,
    progress: &Progress,
    mut contestants: Vec<Contestant<'_>>,
) -> Result<Vec<Samples>> {
    let mut all: Vec<Samples> =
        contestants.iter().map(|contestant| Samples::new(&contestant.name)).collect();
    let steps = (rounds + 1) * contestants.len();
    for round in 0..=rounds {
        let mut order: Vec<usize> = (0..contestants.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for (step, index) in order.into_iter().enumerate() {
            let contestant = &mut contestants[index];
            progress.note_distance();
            progress.at(round * all.len() + step, steps, &contestant.name);
            let value = (contestant.measure)()
                .with_context(|| format!("measuring '{}'", contestant.name))?;
            if round > 0 {
                all[index].values.push(value);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn rounds_alternate_and_the_first_does_not_count() {
        let order = RefCell::new(String::new());
        let contestant = |name: &'static str| {
            let order = &order;
            Contestant::new(name, move || {
                order.borrow_mut().push_str(name);
                Ok(order.borrow().len() as f64)
            })
        };
        let samples =
            alternate(3, &Progress::hidden(), vec![contestant("a"), contestant("b")]).unwrap();
        assert_eq!(*order.borrow(), "abbaabba");
        assert_eq!(samples[0].values, [4.0, 5.0, 8.0]);
        assert_eq!(samples[1].values, [3.0, 6.0, 7.0]);
    }

    #[test]
    fn an_error_names_the_contestant() {
        let failing = Contestant::new("broken", || anyhow::bail!("no device"));
        let error = alternate(1, &Progress::hidden(), vec![failing]).unwrap_err();
        assert_eq!(format!("{error:#}"), "measuring 'broken': no device");
    }
}
