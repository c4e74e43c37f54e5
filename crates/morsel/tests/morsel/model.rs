//! Random sequences of writes, fills, punches and populates, compared with the same operations on
//! an array.

use proptest::prelude::*;
use vellum_morsel::{Access, Shape};

use crate::common::{PAGE, file_of, on_each, pattern};

const LENGTH: u64 = 16 * PAGE - 100;

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64, u8),
    Fill(u64, u64, u64),
    Punch(u64, u64),
    Populate(u64, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = 0..LENGTH + 10;
    let pages = || (0..17_u64, 0..5_u64);
    let step = prop_oneof![
        (bytes.clone(), 0..10_000_u64, any::<u8>())
            .prop_map(|(at, count, byte)| Step::Write(at, count, byte)),
        (0..17_u64, 0..20_000_u64, bytes)
            .prop_map(|(page, count, from)| { Step::Fill(page * PAGE, count, from) }),
        pages().prop_map(|(page, count)| Step::Punch(page * PAGE, (page + count) * PAGE)),
        pages().prop_map(|(page, count)| Step::Populate(page * PAGE, (page + count) * PAGE)),
    ];
    prop::collection::vec(step, 0..20)
}

/// The array's slice of a range, if the Morsel accepts the range.
fn slice(model: &mut [u8], start: u64, end: u64) -> Option<&mut [u8]> {
    model.get_mut(start as usize..end as usize)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_morsel_behaves_like_an_array(steps in steps()) {
        on_each(|provider| {
            let content = pattern(LENGTH as usize);
            let source = file_of(&content);
            let morsel = provider.create(&Shape::of_length(LENGTH)).unwrap();
            let mapping = morsel.map(Access::ReadWrite).unwrap();
            let mut model = vec![0; LENGTH as usize];
            for step in &steps {
                match *step {
                    Step::Write(at, count, byte) => {
                        let done = mapping.write_at(at, &vec![byte; count as usize]);
                        let expected = slice(&mut model, at, at + count);
                        assert_eq!(done.is_ok(), expected.is_some());
                        if let Some(bytes) = expected {
                            bytes.fill(byte);
                        }
                    }
                    Step::Fill(at, count, from) => {
                        let done = morsel.fill(&source, from, at, count);
                        let there = count.min(LENGTH.saturating_sub(from));
                        let fits = at + count <= LENGTH && (count == 0 || there > 0);
                        assert_eq!(done.ok(), fits.then_some(there), "{step:?}");
                        if fits && there > 0 {
                            let bytes = &content[from as usize..(from + there) as usize];
                            slice(&mut model, at, at + there).unwrap().copy_from_slice(bytes);
                        }
                    }
                    Step::Punch(start, end) => {
                        let done = morsel.punch(start..end);
                        let expected = slice(&mut model, start, end);
                        assert_eq!(done.is_ok(), expected.is_some());
                        if let Some(bytes) = expected {
                            bytes.fill(0);
                        }
                    }
                    Step::Populate(start, end) => {
                        let done = morsel.populate(start..end);
                        assert_eq!(done.is_ok(), end <= LENGTH, "{step:?}");
                    }
                }
            }
            let mut found = vec![1; LENGTH as usize];
            mapping.read_at(0, &mut found).unwrap();
            assert!(found == model, "{steps:?}");
        });
    }
}
