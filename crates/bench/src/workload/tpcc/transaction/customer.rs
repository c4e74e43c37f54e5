//! Finding customers by name.

use anyhow::{Result, bail};

use super::ThreadState;
use crate::engine::{Direction, Session};
use crate::workload::tpcc::input::Customer;
use crate::workload::tpcc::keys::{self, CUSTOMER_NAME, DistrictKey};

impl ThreadState<'_> {
    /// The number of a customer. If several have the name, it is the middle one in the order of
    /// first names, rounded up (clause 2.5.2.2).
    pub(super) fn customer_id(
        &mut self,
        district: DistrictKey,
        customer: &Customer,
        session: &mut dyn Session,
    ) -> Result<u32> {
        let last = match customer {
            Customer::Id(number) => return Ok(*number),
            Customer::Last(last) => last,
        };
        let prefix = keys::customer_name_prefix(district, last);
        let namesakes = &mut self.namesakes;
        namesakes.clear();
        session.scan(CUSTOMER_NAME, &prefix, Direction::Forward, &mut |key, _| {
            let is_one = key.starts_with(&prefix);
            if is_one {
                namesakes.push(keys::number_at(key, prefix.len() + 16));
            }
            is_one
        })?;
        match namesakes.len() {
            0 => bail!("no customer {} in {district:?}", String::from_utf8_lossy(last)),
            count => Ok(namesakes[(count - 1) / 2]),
        }
    }
}
