//! Devices and Morsels: user space drives an NVMe controller behind an IOMMU. Its queues and data
//! are in a Morsel.
#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Instant;

use rustix::fs::MemfdFlags;
use vellum_kernel_tests::child::{Child, in_child};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::kernel_log::KernelLog;
use vellum_kernel_tests::morsel::{highest_order, kinds, plan};
use vellum_kernel_tests::nvme::{Controller, QUEUE_PAGES};
use vellum_kernel_tests::vfio::{Access, Device};
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, Turn, access, morsel_turn, persistent};
use vellum_uapi::morsel::{HUGE, PINNABLE, SEAL_CONTENT, SEAL_POPULATION, extent};

/// The pages that the device sees. Queues come first.
const PAGES: u64 = 64;
const LENGTH: usize = PAGES as usize * PAGE;
/// The page for data.
const DATA: u64 = QUEUE_PAGES;
/// The device's address of the first page.
const SEEN_AT: u64 = 1 << 32;

/// The device's address of a page.
fn seen(page: u64) -> u64 {
    SEEN_AT + page * PAGE as u64
}

fn turn() -> Option<(Turn, Device)> {
    let turn = morsel_turn()?;
    Some((turn, Device::open()?))
}

/// A Morsel with more pages than the device may access.
fn pinnable(order: u32) -> Morsel {
    Morsel::new(order, 4 * LENGTH as u64, PINNABLE)
}

/// Such a Morsel, mapped for writing, and the controller with its queues in it.
fn driven<'device>(device: &'device Device, mapping: &Mapping) -> Controller<'device> {
    device.register(mapping.start(), LENGTH, SEEN_AT, Access::ReadWrite).unwrap();
    Controller::new(device, mapping.start(), SEEN_AT)
}

/// The words of the kernel's message about an access that the IOMMU has refused.
fn refused(device: &Device, seen_at: u64) -> String {
    format!("Request device [{}] fault addr {seen_at:#x} ", device.address())
}

/// The device reads what one process writes, and another process sees what the device writes.
#[test]
fn a_device_and_processes_have_the_same_pages() {
    let Some((_turn, device)) = turn() else { return };
    for order in 1..=highest_order() {
        let morsel = pinnable(order);
        let mapping = morsel.mapped();
        let mut controller = driven(&device, &mapping);
        controller.identify(seen(DATA)).unwrap();
        in_child(|| {
            let own = morsel.mapped();
            let model = access::kernel_load(own.page(DATA) + 24, 40).unwrap();
            assert!(model.starts_with(b"QEMU NVMe Ctrl"), "{model:?}");
            own.stamp(DATA + 1, 77);
        });
        controller.write(seen(DATA + 1), 3).unwrap();
        // More than a round of the queue.
        for page in DATA + 2..PAGES {
            controller.read(seen(page), 3).unwrap();
            controller.write(seen(page), page).unwrap();
        }
        in_child(|| {
            let own = morsel.map(libc::PROT_READ).unwrap();
            (DATA + 2..PAGES).for_each(|page| own.assert_stamped(page, 77));
        });
        drop(controller);
        assert_eq!(device.unregister(SEEN_AT, LENGTH), Ok(LENGTH as u64));
        assert_morsels_are_sound();
    }
}

/// The device does not reach memory that is not registered, or is no longer registered.
#[test]
fn a_device_reaches_nothing_else() {
    let Some((_turn, device)) = turn() else { return };
    let mut log = KernelLog::begin();
    let morsel = pinnable(2);
    let mapping = morsel.mapped();
    let mut controller = driven(&device, &mapping);
    mapping.stamp(PAGES, 5);
    // The Morsel's next page. The controller's reaction does not matter.
    log.wait_for(&refused(&device, seen(PAGES)), || {
        let _ = controller.identify(seen(PAGES));
    });
    mapping.assert_stamped(PAGES, 5);
    mapping.stamp(DATA, 6);
    let data = mapping.page(DATA + 1);
    device.register(data, PAGE, 2 * SEEN_AT, Access::ReadWrite).unwrap();
    controller.write(seen(DATA), 1).unwrap();
    controller.read(2 * SEEN_AT, 1).unwrap();
    mapping.assert_stamped(DATA + 1, 6);
    device.unregister(2 * SEEN_AT, PAGE).unwrap();
    mapping.stamp(DATA + 1, 7);
    log.wait_for(&refused(&device, 2 * SEEN_AT), || {
        let _ = controller.read(2 * SEEN_AT, 1);
    });
    mapping.assert_stamped(DATA + 1, 7);
}

/// Through a mapping for reading, a device only gets the right to read.
#[test]
fn a_device_cannot_write_by_a_mapping_for_reading() {
    let Some((_turn, device)) = turn() else { return };
    for order in 0..=highest_order() {
        let morsel = Morsel::new(order, extent(order), PINNABLE);
        morsel.stamp(0, 9);
        for reader in [
            morsel.map(libc::PROT_READ).unwrap(),
            morsel.for_reading().map(libc::PROT_READ).unwrap(),
        ] {
            let at = 2 * SEEN_AT;
            let tried = device.register(reader.start(), PAGE, at, Access::ReadWrite);
            assert_eq!(tried, Err(Errno::FAULT), "order {order}");
            device.register(reader.start(), PAGE, at, Access::Read).unwrap();
            let mapping = pinnable(1).mapped();
            let mut controller = driven(&device, &mapping);
            let _ = controller.identify(at);
            morsel.assert_stamped(0, 9);
            controller.write(at, 2).unwrap();
            controller.read(seen(DATA), 2).unwrap();
            mapping.assert_stamped(DATA, 9);
            drop(controller);
            device.unregister(SEEN_AT, LENGTH).unwrap();
            device.unregister(at, PAGE).unwrap();
        }
    }
}

/// A Morsel that is not pinnable cannot be registered with a device, through any mapping.
#[test]
fn a_morsel_that_is_not_pinnable_cannot_be_registered() {
    let Some((_turn, device)) = turn() else { return };
    for (order, flags) in kinds().into_iter().filter(|(_, flags)| flags & PINNABLE == 0) {
        let morsel = Morsel::of((order, flags));
        assert_not_registered(&device, &morsel);
    }
}

/// The kernel counts no references to persistent memory that VFIO takes from page tables.
#[test]
fn a_morsel_on_persistent_memory_cannot_be_registered() {
    let Some((_turn, device)) = turn() else { return };
    if !persistent::is_there() {
        return;
    }
    persistent::format();
    for order in 0..=3 {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).custom_flags(libc::O_TMPFILE);
        let morsel = Morsel::from(options.open(persistent::FOLDER).unwrap());
        morsel.create(&plan(order, extent(order).min(LENGTH as u64), 0)).unwrap();
        assert_not_registered(&device, &morsel);
    }
    persistent::unmount().unwrap();
}

#[track_caller]
fn assert_not_registered(device: &Device, morsel: &Morsel) {
    // Present pages and an absent one.
    morsel.populate(0, 1).unwrap();
    let writable = morsel.mapped();
    let reader = morsel.for_reading().map(libc::PROT_READ).unwrap();
    for (mapping, access) in [
        (&writable, Access::ReadWrite),
        (&writable, Access::Read),
        (&reader, Access::Read),
        (&reader, Access::ReadWrite),
    ] {
        for page in [0, extent(morsel.stat().order) / PAGE as u64 - 1] {
            let tried = device.register(mapping.page(page), PAGE, SEEN_AT, access);
            let stat = morsel.stat();
            // Linux 6.1 expects a leaf of 4 KiB, and warns about one of 2 MiB.
            let expected = [Errno::FAULT, Errno::INVAL];
            let expected = &expected[..1 + usize::from(stat.flags & HUGE != 0)];
            let is_right = tried.is_err_and(|error| expected.contains(&error));
            assert!(is_right, "page {page}, {access:?}, {stat:?}: {tried:?}");
        }
    }
}

/// A page that is punched while it is registered stays with the device until it is unregistered,
/// and has no other use. The Morsel gets another page.
#[test]
fn a_page_that_is_punched_stays_with_its_device() {
    let Some((_turn, device)) = turn() else { return };
    for order in 1..=highest_order() {
        let morsel = pinnable(order);
        let mapping = morsel.mapped();
        let mut controller = driven(&device, &mapping);
        mapping.stamp(DATA, 1);
        mapping.stamp(DATA + 1, 2);
        controller.write(seen(DATA + 1), 2).unwrap();
        morsel.punch(DATA * PAGE as u64, PAGE as u64).unwrap();
        assert_morsels_are_sound();
        // Other Morsels use the free pages.
        let other = Morsel::new(2, 64 << 20, 0);
        let others = other.mapped();
        (0..(64 << 20) / PAGE as u64).for_each(|page| others.stamp(page, 3));
        mapping.stamp(DATA, 4);
        // The device still has the old page,
        controller.write(seen(DATA), 1).unwrap();
        controller.read(seen(DATA + 2), 1).unwrap();
        mapping.assert_stamped(DATA + 2, 1);
        // and writes to a page that no other Morsel has.
        controller.read(seen(DATA), 2).unwrap();
        mapping.assert_stamped(DATA, 4);
        (0..(64 << 20) / PAGE as u64).for_each(|page| others.assert_stamped(page, 3));
        drop(controller);
        device.unregister(SEEN_AT, LENGTH).unwrap();
        assert_morsels_are_sound();
    }
}

/// A device that has registered a mapping for writing keeps the right after the mapping is gone.
#[test]
fn content_that_a_device_may_write_cannot_be_sealed() {
    let Some((_turn, device)) = turn() else { return };
    for order in 0..=highest_order() {
        let morsel = Morsel::new(order, extent(order), PINNABLE);
        morsel.stamp(0, 8);
        let reader = morsel.for_reading().map(libc::PROT_READ).unwrap();
        let mapping = morsel.mapped();
        device.register(mapping.start(), PAGE, SEEN_AT, Access::ReadWrite).unwrap();
        drop(mapping);
        assert_eq!(morsel.seal(SEAL_CONTENT), Err(Errno::BUSY), "order {order}");
        assert_eq!(morsel.stat().seals, 0);
        morsel.seal(SEAL_POPULATION).unwrap();
        device.unregister(SEEN_AT, PAGE).unwrap();
        reader.assert_stamped(0, 8);
        morsel.seal(SEAL_CONTENT).unwrap();
        // A device may read a sealed Morsel. That does not prevent further seals.
        let tried = device.register(reader.start(), PAGE, SEEN_AT, Access::ReadWrite);
        assert_eq!(tried, Err(Errno::FAULT), "order {order}");
        device.register(reader.start(), PAGE, SEEN_AT, Access::Read).unwrap();
        morsel.seal(SEAL_CONTENT).unwrap();
        device.unregister(SEEN_AT, PAGE).unwrap();
    }
}

/// Memory is freed however the registration ends: unregistered, closed, or killed.
#[test]
fn no_device_leaves_anything_behind() {
    let Some((_turn, device)) = turn() else { return };
    drop(device);
    let memory = Memory::now();
    let register = |device: &Device| {
        let morsel = Morsel::new(2, 64 << 20, PINNABLE);
        let mapping = morsel.mapped();
        device.register(mapping.start(), 64 << 20, SEEN_AT, Access::ReadWrite).unwrap();
        // The Morsel ends before the device has unregistered its pages.
    };
    let device = Device::open().unwrap();
    register(&device);
    device.unregister(SEEN_AT, 64 << 20).unwrap();
    memory.assert_back();
    register(&device);
    drop(device);
    memory.assert_back();
    let (mut ready, mut told) = std::io::pipe().unwrap();
    let child = Child::start(move || {
        let device = Device::open().unwrap();
        register(&device);
        std::io::Write::write_all(&mut told, b"1").unwrap();
        loop {
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
    });
    std::io::Read::read_exact(&mut ready, &mut [0]).unwrap();
    child.kill();
    memory.assert_back();
}

/// A measurement: how long it takes to register memory.
#[test]
#[ignore = "it measures"]
fn how_long_registering_with_a_device_takes() {
    let Some((_turn, device)) = turn() else { return };
    let length = 64 << 20;
    let morsel = Morsel::new(2, length as u64, PINNABLE);
    morsel.populate(0, length as u64).unwrap();
    let mapping = morsel.mapped();
    let memory = File::from(rustix::fs::memfd_create("memory", MemfdFlags::empty()).unwrap());
    memory.set_len(length as u64).unwrap();
    let other = Mapping::of_device(memory.as_fd(), 0, length).unwrap();
    for page in 0..length / PAGE {
        access::store(other.start() + page * PAGE, 1).unwrap();
    }
    for round in 0..3 {
        for (name, address) in [("Morsel", mapping.start()), ("memfd", other.start())] {
            let start = Instant::now();
            device.register(address, length, SEEN_AT, Access::ReadWrite).unwrap();
            let registered = start.elapsed();
            device.unregister(SEEN_AT, length).unwrap();
            let both = start.elapsed();
            println!("{round}: {name}: 64 MiB registered in {registered:?}, and gone in {both:?}");
        }
    }
}
