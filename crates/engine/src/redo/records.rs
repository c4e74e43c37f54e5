//! Where recovery reads records: the log, or a copy of a part of it.

use vellum_log::{Log, Lsn, RecordRef};

use crate::error::Result;

/// Where recovery reads the records.
pub(crate) trait Records {
    /// Calls `visit` with each record from `from` on, in order.
    fn each(&self, from: Lsn, visit: &mut dyn FnMut(RecordRef<'_>) -> Result<()>) -> Result<()>;
}

impl Records for Log {
    fn each(&self, from: Lsn, visit: &mut dyn FnMut(RecordRef<'_>) -> Result<()>) -> Result<()> {
        let mut scan = self.scan(Some(from))?;
        while let Some(record) = scan.next_ref()? {
            visit(record)?;
        }
        Ok(())
    }
}
