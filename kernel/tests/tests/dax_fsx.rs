//! An fsx for file tables (`src/fsx`) for a short time; a million operations with `VELLUM_SOAK=1`.

use vellum_kernel_tests::{dax_turn, fsx};

#[test]
fn every_way_shows_the_bytes_of_the_model() {
    let Some(_turn) = dax_turn() else { return };
    fsx::sequences(10);
}
