//! Transactions ([`Transaction`]) and consistent views of a store ([`Snapshot`]).
//!
//! A transaction reads the store as it was when the transaction began, and keeps its own changes in
//! memory. Its commit locks the leaves that it changes, checks that no other transaction has
//! changed what it has read, and changes all leaves in one group, which has one record in the log.
//! So pages have committed values only: recovery has nothing to undo, and an abort costs nothing.
//!
//! docs/transactions.md says what transactions guarantee, and why they work as they do.

mod entries;
mod snapshot;
mod transaction;
mod view;

pub use entries::ViewEntries;
pub use snapshot::Snapshot;
pub use transaction::{Durability, Isolation, Savepoint, Transaction, TransactionOptions};
