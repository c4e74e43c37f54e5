//! Types of C: handles, and the shape and the state of a Morsel.

use vellum_morsel::{Access, BackendChoice, BackendKind, Mapping, Morsel, Shape, Stat};

use crate::call::{Failure, Outcome};

/// `vellum_morsel`.
#[derive(Debug)]
pub struct Handle(pub(crate) Morsel);

/// `vellum_morsel_mapping`.
#[derive(Debug)]
pub struct MappingHandle(pub(crate) Mapping);

/// `struct vellum_morsel_shape`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CShape {
    length: u64,
    address: u64,
    order: u32,
    flags: u32,
}

const HUGE: u32 = 1;
const PINNABLE: u32 = 2;
const INHERIT: u32 = 4;

impl CShape {
    pub(crate) fn shape(&self) -> Outcome<Shape> {
        if self.flags & !(HUGE | PINNABLE | INHERIT) != 0 {
            return Err(Failure::argument("flags of the shape that do not exist"));
        }
        let mut shape = match (self.length, self.order) {
            (0, order) if order > 0 => Shape::of_order(order),
            (length, 0) => Shape::of_length(length),
            (length, order) => Shape::of_length(length).with_order(order),
        };
        if self.flags & HUGE != 0 {
            shape = shape.huge();
        }
        if self.flags & PINNABLE != 0 {
            shape = shape.pinnable();
        }
        if self.flags & INHERIT != 0 {
            shape = shape.inherit();
        }
        Ok(if self.address == 0 { shape } else { shape.bound_to(self.address) })
    }
}

impl From<Shape> for CShape {
    fn from(shape: Shape) -> Self {
        let flag = |flag, is_on| if is_on { flag } else { 0 };
        Self {
            length: shape.length(),
            address: shape.address().unwrap_or(0),
            order: shape.order(),
            flags: flag(HUGE, shape.is_huge())
                | flag(PINNABLE, shape.is_pinnable())
                | flag(INHERIT, shape.is_inherited()),
        }
    }
}

/// `struct vellum_morsel_stat`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CStat {
    shape: CShape,
    backend: u32,
    seals: u32,
    pages: u64,
    huge: i64,
    tables: i64,
    mounts: i64,
}

impl CStat {
    pub(crate) fn new(backend: BackendKind, stat: &Stat) -> Self {
        // A count of a machine's pages is always far smaller.
        let known = |count: Option<u64>| count.map_or(-1, |count| count.cast_signed());
        Self {
            shape: stat.shape.into(),
            backend: match backend {
                BackendKind::Kernel => KERNEL,
                BackendKind::Memfd => MEMFD,
            },
            seals: seals::to_bits(stat.seals),
            pages: stat.pages,
            huge: known(stat.huge),
            tables: known(stat.tables),
            mounts: known(stat.mounts),
        }
    }
}

const AUTO: u32 = 0;
const KERNEL: u32 = 1;
const MEMFD: u32 = 2;

pub(crate) fn backend(number: u32) -> Outcome<BackendChoice> {
    match number {
        AUTO => Ok(BackendChoice::Auto),
        KERNEL => Ok(BackendChoice::Only(BackendKind::Kernel)),
        MEMFD => Ok(BackendChoice::Only(BackendKind::Memfd)),
        _ => Err(Failure::argument("a backend that does not exist")),
    }
}

pub(crate) fn access(number: u32) -> Outcome<Access> {
    match number {
        0 => Ok(Access::Read),
        1 => Ok(Access::ReadWrite),
        _ => Err(Failure::argument("an access that does not exist")),
    }
}

pub(crate) mod seals {
    //! Seals as bits.

    use vellum_morsel::Seals;

    use crate::call::{Failure, Outcome};

    const BITS: [(u32, Seals); 2] = [(1, Seals::CONTENT), (2, Seals::POPULATION)];

    pub(crate) fn to_bits(seals: Seals) -> u32 {
        BITS.iter().filter(|(_, seal)| seals.has(*seal)).map(|(bit, _)| bit).sum()
    }

    pub(crate) fn from_bits(bits: u32) -> Outcome<Seals> {
        if bits & !(BITS[0].0 | BITS[1].0) != 0 {
            return Err(Failure::argument("a seal that does not exist"));
        }
        let on = BITS.iter().filter(|(bit, _)| bits & bit != 0);
        Ok(on.fold(Seals::NONE, |seals, (_, seal)| seals | *seal))
    }
}
