//! Processors go offline and online while programs use surfaces and Morsels.
#![allow(clippy::unwrap_used)]

use std::fs;

use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::threads::{Deadline, Stop};
use vellum_kernel_tests::{Mapping, Morsel, PAGE, Plan, Surface, access, morsel_turn};
use vellum_uapi::morsel;

/// Whether the second processor is online.
const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";

/// Brings the processor online when this is dropped.
struct Online;

impl Drop for Online {
    fn drop(&mut self) {
        fs::write(ONLINE, "1").unwrap();
    }
}

const PAGES: u64 = 700;

/// Allocates and frees pages of the surface until a flag stops it.
fn use_surface(surface: &Surface, lane: u64, stop: &Stop) {
    let first = lane * PAGES;
    while !stop.is_said() {
        assert_eq!(surface.alloc(lane as usize, &[(first, 100)]), [(0, 100)]);
        surface.stamp(first + 7, lane);
        surface.assert_stamped(first + 7, lane);
        assert_eq!(surface.free(lane as usize, &[(first, 100)]), [(0, 100)]);
    }
}

/// The same with a Morsel.
fn use_morsel(morsel: &Morsel, mapping: &Mapping, stop: &Stop) {
    while !stop.is_said() {
        mapping.stamp(3, 3);
        morsel.populate(0, PAGES * PAGE as u64).unwrap();
        mapping.assert_stamped(3, 3);
        morsel.punch(0, PAGES * PAGE as u64).unwrap();
        assert_eq!(access::load(mapping.page(3)), Ok(0));
    }
}

#[test]
fn processors_go_offline_and_online_while_pages_are_used() {
    let Some(_turn) = morsel_turn() else { return };
    if !fs::exists(ONLINE).unwrap() {
        eprintln!("skipped: no second processor, or one that stays");
        return;
    }
    let _online = Online;
    let surface = Plan::new(2 * PAGES, 1000).interfaces(2).make();
    let morsels = [0, morsel::PINNABLE, morsel::HUGE].map(|flags| Morsel::new(2, 64 << 20, flags));
    let stop = Stop::default();
    std::thread::scope(|scope| {
        let _at_end = stop.at_end();
        for lane in 0..2 {
            let (surface, stop) = (&surface, &stop);
            scope.spawn(move || use_surface(surface, lane, stop));
        }
        for morsel in &morsels {
            let stop = &stop;
            scope.spawn(move || use_morsel(morsel, &morsel.mapped(), stop));
        }
        let deadline = Deadline::after_ms(8000);
        while !deadline.is_over() {
            for online in ["0", "1"] {
                fs::write(ONLINE, online).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        }
    });
    surface.assert_counted();
    assert_morsels_are_sound();
}
