//! The second workload: clients of a shop, whose books must balance.
//!
//! It shares nothing with the first workload but the machine. There is no model of the store.
//! Clients run transactions in steps that the seed interleaves: they place, ship and cancel orders
//! and pay each other. Each transaction keeps rules that hold for the whole shop, so a lost or torn
//! transaction, a value of another time or an anomaly breaks a rule:
//!
//! - Money is conserved: the accounts and the takings have what the accounts had at first, and the
//!   takings are the amounts of all orders.
//! - Each order stands once in the index of its customer, and in the queue as long as it is open.
//! - No customer has more open orders than the limit, which only a scan of the index can tell.
//! - A parcel's bytes are those that its head names.
//! - Each commit has a number. What is there after a crash are the commits up to some number, and
//!   none later; with all that were durable.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum::{Durability, Error, Isolation, Store, Transaction, TransactionOptions, Tree};
use vellum_log::LogError;
use vellum_testing::random::{Random, bytes};

use crate::compactions::Compactions;
use crate::failure::{Failure, Outcome, ensure, is_from_outside};
use crate::machine::{Crash, End, Fault, Machine};
use crate::recovery::{Recovered, Recovery, Sizes};
use crate::report::Report;
use crate::slow::SlowLog;
use crate::story::tell;

const CUSTOMERS: u16 = 12;
const CLIENTS: usize = 4;
/// What each customer has at first.
const EACH: u64 = 1000;
/// A customer has at most so many open orders.
const OPEN_MAX: usize = 3;
/// The most crashes of a day that are looked at beside.
const RECOVERIES_MAX: usize = 12;

const ENDS: &[End] =
    &[End::PowerLoss, End::PowerLoss, End::Kill, End::MisdirectedWrite, End::MisdirectedBlock];

const NAMES: [&str; 6] = ["accounts", "orders", "queue", "index", "parcels", "books"];

/// The trees of the shop.
#[derive(Clone, Debug)]
struct Trees {
    /// By customer: the balance, and filling.
    accounts: Tree,
    /// By number: an [`Order`].
    orders: Tree,
    /// The numbers of open orders.
    queue: Tree,
    /// A customer and the number of an order.
    index: Tree,
    /// Long values with a head that names their bytes.
    parcels: Tree,
    /// By client: the takings, and the count and the number of its newest commit.
    books: Tree,
}

impl Trees {
    fn of(mut tree: impl FnMut(&str) -> vellum::Result<Tree>) -> vellum::Result<Trees> {
        let [accounts, orders, queue, index, parcels, books] = NAMES;
        Ok(Trees {
            accounts: tree(accounts)?,
            orders: tree(orders)?,
            queue: tree(queue)?,
            index: tree(index)?,
            parcels: tree(parcels)?,
            books: tree(books)?,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    customer: u16,
    amount: u64,
    is_open: bool,
}

impl Order {
    fn encode(self) -> Vec<u8> {
        let mut value = self.customer.to_be_bytes().to_vec();
        value.extend(self.amount.to_be_bytes());
        value.push(self.is_open.into());
        value
    }

    fn decode(value: &[u8]) -> Option<Order> {
        let (customer, rest) = value.split_first_chunk()?;
        let (amount, rest) = rest.split_first_chunk()?;
        let is_open = *rest.first()? == 1;
        let (customer, amount) = (u16::from_be_bytes(*customer), u64::from_be_bytes(*amount));
        Some(Order { customer, amount, is_open })
    }
}

fn index_key(customer: u16, order: u64) -> Vec<u8> {
    [&customer.to_be_bytes()[..], &order.to_be_bytes()].concat()
}

/// The number at the begin of a value; 0 without a value.
fn number_in(value: Option<&[u8]>) -> u64 {
    let first = value.and_then(|value| value.first_chunk());
    first.map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

fn number(view: &Transaction, tree: &Tree, key: &[u8]) -> vellum::Result<u64> {
    Ok(number_in(view.get(tree, key)?.as_deref()))
}

fn parcel(random: &mut Random) -> Vec<u8> {
    let (len, seed) = (random.pick(&[10, 700, 4_200, 9_000]), random.next());
    let len = random.below(len) + 1;
    [&len.to_be_bytes()[..], &seed.to_be_bytes(), &bytes(len as usize, seed)].concat()
}

/// What a client does in a transaction, in steps.
#[derive(Clone, Debug)]
enum Errand {
    Place { customer: u16, amount: u64, number: Option<u64> },
    Ship { order: Option<u64> },
    Cancel { customer: u16, order: Option<u64> },
    Pay { from: u16, to: u16, amount: u64, balances: Option<(u64, u64)> },
    Send { key: Vec<u8>, parcel: Option<Vec<u8>> },
    Audit,
}

/// A client with a transaction.
#[derive(Debug)]
struct Running {
    transaction: Transaction,
    errand: Errand,
    durability: Durability,
    is_ready: bool,
}

impl Errand {
    fn random(random: &mut Random) -> Errand {
        let customer = random.below(CUSTOMERS.into()) as u16;
        let other = random.below(CUSTOMERS.into()) as u16;
        match random.below(16) {
            0..5 => {
                let amount = 1 + random.below(60);
                Errand::Place { customer, amount, number: None }
            }
            5..8 => Errand::Ship { order: None },
            8..10 => Errand::Cancel { customer, order: None },
            10..13 => {
                let amount = random.below(100);
                Errand::Pay { from: customer, to: other, amount, balances: None }
            }
            13..15 => {
                let key = (random.below(30) as u16).to_be_bytes().to_vec();
                let parcel = (!random.once_in(3)).then(|| parcel(random));
                Errand::Send { key, parcel }
            }
            _ => Errand::Audit,
        }
    }

    /// Only errands that write all that they read keep the rules with snapshot isolation.
    fn isolation(&self, random: &mut Random) -> Isolation {
        match self {
            Errand::Pay { .. } if random.once_in(2) => Isolation::Snapshot,
            _ => Isolation::Serializable,
        }
    }

    /// Takes the next step. Returns whether it was the last one.
    fn step(
        &mut self,
        client: usize,
        transaction: &mut Transaction,
        trees: &Trees,
        random: &mut Random,
    ) -> Outcome<vellum::Result<bool>> {
        Ok(match self {
            Errand::Audit => {
                return audit(transaction, trees, random.once_in(2))
                    .map(|done| done.map(|()| true));
            }
            Errand::Place { customer, amount, number } => {
                place(client, transaction, trees, (*customer, *amount), number, random)
            }
            Errand::Ship { order } => ship(transaction, trees, order),
            Errand::Cancel { customer, order } => {
                cancel(client, transaction, trees, *customer, order, random)
            }
            Errand::Pay { from, to, amount, balances } => {
                pay(transaction, trees, (*from, *to, *amount), balances, random)
            }
            Errand::Send { key, parcel } => match parcel {
                Some(parcel) => transaction.put(&trees.parcels, key, parcel).map(|()| true),
                None => transaction.remove(&trees.parcels, key).map(|_| true),
            },
        })
    }
}

fn set_balance(
    transaction: &mut Transaction,
    trees: &Trees,
    customer: u16,
    balance: u64,
    random: &mut Random,
) -> vellum::Result<()> {
    let mut value = balance.to_be_bytes().to_vec();
    value.resize(random.pick(&[8, 8, 200, 700, 5_000]), 7);
    transaction.put(&trees.accounts, &customer.to_be_bytes(), &value)
}

fn balance(view: &Transaction, trees: &Trees, customer: u16) -> vellum::Result<u64> {
    number(view, &trees.accounts, &customer.to_be_bytes())
}

/// The first step finds a number that no order has, and counts the customer's open orders.
fn place(
    client: usize,
    transaction: &mut Transaction,
    trees: &Trees,
    (customer, amount): (u16, u64),
    number: &mut Option<u64>,
    random: &mut Random,
) -> vellum::Result<bool> {
    let Some(number) = *number else {
        let mut open = 0;
        for entry in transaction.prefix(&trees.index, &customer.to_be_bytes())? {
            let (key, _) = entry?;
            let order = transaction.get(&trees.orders, &key[2..])?;
            let order = order.and_then(|order| Order::decode(&order));
            open += usize::from(order.is_some_and(|order| order.is_open));
        }
        if open >= OPEN_MAX || balance(transaction, trees, customer)? < amount {
            return Ok(true);
        }
        let last = transaction.entries(&trees.orders)?.next_back().transpose()?;
        *number = Some(last.map_or(1, |(key, _)| number_in(Some(&key)) + 1));
        return Ok(false);
    };
    let order = Order { customer, amount, is_open: true };
    transaction.put(&trees.orders, &number.to_be_bytes(), &order.encode())?;
    transaction.put(&trees.queue, &number.to_be_bytes(), b"")?;
    transaction.put(&trees.index, &index_key(customer, number), b"")?;
    let left = balance(transaction, trees, customer)? - amount;
    set_balance(transaction, trees, customer, left, random)?;
    let takings =
        self::number(transaction, &trees.books, &takings_key(client))?.wrapping_add(amount);
    transaction.put(&trees.books, &takings_key(client), &takings.to_be_bytes())?;
    Ok(true)
}

fn ship(
    transaction: &mut Transaction,
    trees: &Trees,
    order: &mut Option<u64>,
) -> vellum::Result<bool> {
    let Some(order) = *order else {
        let first = transaction.entries(&trees.queue)?.next().transpose()?;
        *order = first.map(|(key, _)| number_in(Some(&key)));
        return Ok(order.is_none());
    };
    let key = order.to_be_bytes();
    let found = transaction.get(&trees.orders, &key)?.and_then(|order| Order::decode(&order));
    let Some(found) = found else { return Ok(true) };
    transaction.put(&trees.orders, &key, &Order { is_open: false, ..found }.encode())?;
    transaction.remove(&trees.queue, &key)?;
    Ok(true)
}

fn cancel(
    client: usize,
    transaction: &mut Transaction,
    trees: &Trees,
    customer: u16,
    order: &mut Option<u64>,
    random: &mut Random,
) -> vellum::Result<bool> {
    let Some(order) = *order else {
        let mut orders = transaction.prefix(&trees.index, &customer.to_be_bytes())?;
        let first = if random.once_in(2) { orders.next() } else { orders.next_back() };
        *order = first.transpose()?.map(|(key, _)| number_in(Some(&key[2..])));
        return Ok(order.is_none());
    };
    let key = order.to_be_bytes();
    let found = transaction.get(&trees.orders, &key)?.and_then(|order| Order::decode(&order));
    let Some(found) = found.filter(|found| found.customer == customer) else { return Ok(true) };
    transaction.remove(&trees.orders, &key)?;
    transaction.remove(&trees.queue, &key)?;
    transaction.remove(&trees.index, &index_key(customer, order))?;
    let more = balance(transaction, trees, customer)? + found.amount;
    set_balance(transaction, trees, customer, more, random)?;
    let takings =
        number(transaction, &trees.books, &takings_key(client))?.wrapping_sub(found.amount);
    transaction.put(&trees.books, &takings_key(client), &takings.to_be_bytes())?;
    Ok(true)
}

fn pay(
    transaction: &mut Transaction,
    trees: &Trees,
    (from, to, amount): (u16, u16, u64),
    balances: &mut Option<(u64, u64)>,
    random: &mut Random,
) -> vellum::Result<bool> {
    let Some((of_from, of_to)) = *balances else {
        let of_from = balance(transaction, trees, from)?;
        *balances = Some((of_from, balance(transaction, trees, to)?));
        return Ok(from == to || of_from < amount);
    };
    set_balance(transaction, trees, from, of_from - amount, random)?;
    set_balance(transaction, trees, to, of_to + amount, random)?;
    Ok(true)
}

/// The entries of a tree, as a view sees them.
fn all(
    view: &Transaction,
    tree: &Tree,
    backwards: bool,
) -> vellum::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let entries = view.entries(tree)?;
    let one = |entry: vellum::Result<(Vec<u8>, vellum::Value<'_>)>| {
        entry.map(|(key, value)| (key, value.to_vec()))
    };
    match backwards {
        false => entries.map(one).collect(),
        true => {
            let mut found = entries.rev().map(one).collect::<vellum::Result<Vec<_>>>()?;
            found.reverse();
            Ok(found)
        }
    }
}

/// Checks the rules, as a view sees the shop. Inside is an error of the store.
fn audit(view: &Transaction, trees: &Trees, backwards: bool) -> Outcome<vellum::Result<()>> {
    let read = || -> vellum::Result<_> {
        let accounts = all(view, &trees.accounts, backwards)?;
        let orders = all(view, &trees.orders, backwards)?;
        let queue = all(view, &trees.queue, backwards)?;
        let index = all(view, &trees.index, backwards)?;
        let parcels = all(view, &trees.parcels, backwards)?;
        let mut takings = 0_u64;
        for client in 0..CLIENTS {
            takings = takings.wrapping_add(number(view, &trees.books, &takings_key(client))?);
        }
        Ok((accounts, orders, queue, index, parcels, takings))
    };
    let (accounts, orders, queue, index, parcels, takings) = match read() {
        Ok(read) => read,
        Err(error) => return Ok(Err(error)),
    };
    let owned: u64 = accounts.iter().map(|(_, value)| number_in(Some(value))).sum();
    let whole = u64::from(CUSTOMERS) * EACH;
    ensure!(
        accounts.len() == usize::from(CUSTOMERS) && owned.wrapping_add(takings) == whole,
        "{} accounts have {owned}, the takings {takings}, and not {whole} together",
        accounts.len()
    );
    let mut of_orders = 0;
    let (mut must_index, mut must_queue) = (Vec::new(), Vec::new());
    let mut open = BTreeMap::<u16, usize>::new();
    for (key, value) in &orders {
        let Some(order) = Order::decode(value) else {
            return Err(Failure::new(format!("an order is torn: {value:02x?}")));
        };
        of_orders += order.amount;
        must_index.push(index_key(order.customer, number_in(Some(key))));
        if order.is_open {
            must_queue.push(key.clone());
            *open.entry(order.customer).or_default() += 1;
        }
    }
    must_index.sort();
    ensure!(of_orders == takings, "the orders have {of_orders} and the takings {takings}");
    let keys = |entries: &[(Vec<u8>, Vec<u8>)]| -> Vec<Vec<u8>> {
        entries.iter().map(|(key, _)| key.clone()).collect()
    };
    ensure!(keys(&index) == must_index, "the index has other orders than there are");
    ensure!(keys(&queue) == must_queue, "the queue has other orders than those that are open");
    let most = open.values().max().copied().unwrap_or(0);
    ensure!(most <= OPEN_MAX, "a customer has {most} open orders, and the limit is {OPEN_MAX}");
    for (key, value) in &parcels {
        let len = number_in(Some(value)) as usize;
        let seed = number_in(value.get(8..));
        let is_whole = value.get(16..).is_some_and(|content| content == bytes(len, seed));
        ensure!(is_whole, "the parcel {key:02x?} has other bytes than its head names");
    }
    Ok(Ok(()))
}

/// The commits that were made, and what a crash may have taken of them.
#[derive(Clone, Debug, Default)]
struct Commits {
    /// The client of each commit, in their order. The first has the number 1.
    of: Vec<usize>,
}

impl Commits {
    fn count_of(&self, client: usize, up_to: usize) -> u64 {
        self.of[..up_to].iter().filter(|of| **of == client).count() as u64
    }

    /// Which commits a store has: those up to some number. Checks that these are all.
    fn judge(&self, found: &[(u64, u64)], (synced, begun): (usize, usize)) -> Outcome<usize> {
        let last = found.iter().map(|(_, number)| *number).max().unwrap_or(0) as usize;
        let begun = begun.min(self.of.len());
        ensure!(
            (synced..=begun).contains(&last),
            "the newest commit is {last}, and must be one of {synced} to {begun}"
        );
        for (client, (count, _)) in found.iter().enumerate() {
            let must = self.count_of(client, last);
            ensure!(
                *count == must,
                "client {client} has {count} commits, and {must} of the first {last}"
            );
        }
        Ok(last)
    }
}

/// Each client has takings of its own, so that clients meet in ranges of keys alone. Those of one
/// may be less than nothing: their sum counts.
fn takings_key(client: usize) -> Vec<u8> {
    format!("takings {client}").into_bytes()
}

fn client_key(client: usize) -> Vec<u8> {
    format!("client {client}").into_bytes()
}

/// A day of the shop: until the store crashes.
struct Shop {
    random: Random,
    sizes: Sizes,
    machine: Arc<Machine>,
    store: Store,
    trees: Trees,
    clients: [Option<Running>; CLIENTS],
    commits: Commits,
    synced: usize,
    full_for: u64,
    is_over: bool,
    /// The crash with which the day ends.
    ending: Option<Crash>,
    compactions: Compactions,
    slow: SlowLog,
    report: Report,
}

/// Runs a seed.
pub(crate) fn run(seed: u64) -> Outcome<Report> {
    let mut random = Random(!seed);
    let mut sizes = Sizes::random(&mut random);
    let slow = SlowLog::random(seed, &mut sizes);
    let machine = Machine::new(sizes.new_log(random.next()), random.next());
    let options = sizes.options(&machine).page_frames(sizes.page_frames);
    let open = || -> vellum::Result<_> {
        let store = Store::create_on(machine.clone(), &options)?;
        let trees = Trees::of(|name| store.create_tree(name))?;
        for customer in 0..CUSTOMERS {
            trees.accounts.upsert(&customer.to_be_bytes(), &EACH.to_be_bytes())?;
        }
        store.sync()?;
        Ok((store, trees))
    };
    let (store, trees) = open().map_err(Failure::of("a new shop"))?;
    let mut shop = Shop {
        random,
        sizes,
        machine,
        store,
        trees,
        clients: [const { None }; CLIENTS],
        commits: Commits::default(),
        synced: 0,
        full_for: 0,
        is_over: false,
        ending: None,
        compactions: Compactions::random(seed),
        slow,
        report: Report::default(),
    };
    let days = shop.random.pick(&[1, 3, 5]);
    for day in 1..=days {
        shop.day()?;
        shop.end(day == days)?;
    }
    shop.report.trace = Random(shop.report.trace ^ shop.machine.trace()).next();
    Ok(shop.report)
}

impl Shop {
    fn day(&mut self) -> Outcome {
        let crash_once_in = self.random.pick(&[15, 60, 300]);
        self.machine.crash_once_in(crash_once_in, ENDS);
        self.slow.begin(&self.store, &self.machine);
        self.note();
        let mut recoveries = 0;
        for _ in 0..self.random.pick(&[30, 200, 900]) {
            self.weather();
            self.synced = self.synced.max(self.slow.pass(&self.machine)?);
            self.note();
            let client = self.random.index(CLIENTS);
            self.serve(client)?;
            if self.random.once_in(20) {
                self.store.work_for_log();
            }
            if self.compactions.is_due() {
                self.compact()?;
            }
            for crash in self.machine.take_crashes() {
                if crash.can_go_on() && self.random.once_in(10) {
                    self.ending = Some(crash);
                    return Ok(());
                }
                if recoveries < RECOVERIES_MAX {
                    self.recover(|recovery| recovery.look_at(crash))?;
                    recoveries += 1;
                }
            }
            if self.is_over {
                break;
            }
        }
        Ok(())
    }

    fn note(&self) {
        self.machine.note((self.synced, self.commits.of.len()));
    }

    fn weather(&mut self) {
        match self.full_for {
            0 if self.random.once_in(200) => {
                self.full_for = self.random.pick(&[5, 40]);
                match self.random.once_in(2) {
                    true => self.machine.set_disk_full(true),
                    false => self.machine.set_log_full(true),
                }
            }
            0 => {}
            1 => {
                self.full_for = 0;
                self.machine.set_disk_full(false);
                self.machine.set_log_full(false);
            }
            _ => self.full_for -= 1,
        }
        if self.random.once_in(500) {
            let fault = self.random.pick(&[
                Fault::Read,
                Fault::Write,
                Fault::Sync,
                Fault::LogAppend,
                Fault::LogSync,
            ]);
            self.machine.fail(fault, 1 + self.random.below(8));
        }
    }

    /// Moves pages to the front of the file, while clients have transactions.
    fn compact(&mut self) -> Outcome {
        match self.compactions.run(&self.store) {
            Ok(_) => {
                self.synced = self.commits.of.len();
                self.note();
                Ok(())
            }
            Err(error) => self.refused(&error),
        }
    }

    /// Goes on with a client's errand.
    fn serve(&mut self, client: usize) -> Outcome {
        let Some(mut running) = self.clients[client].take() else { return self.begin(client) };
        if running.is_ready {
            return self.commit(client, running);
        }
        let Running { transaction, errand, .. } = &mut running;
        match errand.step(client, transaction, &self.trees, &mut self.random)? {
            Ok(is_last) => {
                running.is_ready = is_last;
                self.clients[client] = Some(running);
                Ok(())
            }
            // The transaction ends, and has changed nothing.
            Err(error) => self.refused(&error),
        }
    }

    fn begin(&mut self, client: usize) -> Outcome {
        let errand = Errand::random(&mut self.random);
        let durability =
            self.random.pick(&[Durability::Synced, Durability::Buffered, Durability::None]);
        let isolation = errand.isolation(&mut self.random);
        let options = TransactionOptions::new().durability(durability).isolation(isolation);
        let transaction = match self.store.begin_with(options) {
            Ok(transaction) => transaction,
            Err(error) => return self.refused(&error),
        };
        self.clients[client] = Some(Running { transaction, errand, durability, is_ready: false });
        Ok(())
    }

    fn commit(&mut self, client: usize, running: Running) -> Outcome {
        let Running { mut transaction, errand, durability, .. } = running;
        let is_audit = matches!(errand, Errand::Audit);
        if !is_audit {
            // Written without a read, so that it conflicts with nothing.
            self.commits.of.push(client);
            let number = self.commits.of.len();
            let count = self.commits.count_of(client, number);
            let value = [count.to_be_bytes(), (number as u64).to_be_bytes()].concat();
            if let Err(error) = transaction.put(&self.trees.books, &client_key(client), &value) {
                self.commits.of.pop();
                return self.refused(&error);
            }
            self.note();
        }
        let changes = (!is_audit).then_some(self.commits.of.len());
        let is_synced = durability == Durability::Synced;
        let (outcome, goes_on) = self.slow.commit(transaction, changes, &self.machine);
        tell(|| format!("{}: client {client}: {errand:?}: {outcome:?}", self.commits.of.len()));
        match outcome {
            Ok(()) => {
                self.report.commits += 1;
                self.report.changes += u64::from(!is_audit);
                if !is_audit && (goes_on || durability != Durability::None) {
                    self.slow.commits_soon(self.commits.of.len());
                }
                if is_synced && !is_audit && !goes_on {
                    self.synced = self.commits.of.len();
                    self.note();
                }
                Ok(())
            }
            Err(error) if is_audit => self.refused(&error),
            Err(Error::Conflict) => {
                self.commits.of.pop();
                self.report.conflicts += 1;
                Ok(())
            }
            Err(Error::NotDurable(_)) => {
                self.is_over = true;
                Ok(())
            }
            Err(error) => {
                self.refused(&error)?;
                if !self.is_over {
                    // The store goes on, so nothing has changed.
                    self.commits.of.pop();
                }
                Ok(())
            }
        }
    }

    /// The store has refused something. That must have a cause outside of it.
    fn refused(&mut self, error: &Error) -> Outcome {
        self.report.refused += 1;
        let is_expected = is_from_outside(error)
            || matches!(error, Error::TransactionTooLarge(_) | Error::VersionsFull { .. });
        ensure!(is_expected, "the shop is refused: {error}");
        let is_full = matches!(error, Error::DiskFull(_) | Error::Log(LogError::Full { .. }));
        ensure!(!is_full || self.full_for > 0, "what has room is full: {error}");
        self.machine.clear_faults();
        self.is_over |= self.store.sync().is_err();
        Ok(())
    }

    /// Recovers the store, with what `run` does of a recovery.
    fn recover<T>(&mut self, run: impl FnOnce(&mut Recovery<'_>) -> Outcome<T>) -> Outcome<T> {
        let commits = &self.commits;
        let judge =
            |store: &Store, noted: (usize, usize)| commits.judge(&look(store)?, noted).map(drop);
        run(&mut Recovery {
            sizes: self.sizes,
            may_lose_pages: false,
            judge: &judge,
            look: &mut |_| Ok(()),
            report: &mut self.report,
            random: &mut self.random,
        })
    }

    /// The day ends with a crash, or with a close.
    fn end(&mut self, is_last: bool) -> Outcome {
        self.clients = [const { None }; CLIENTS];
        self.machine.crash_once_in(u64::MAX, ENDS);
        let ending = self.ending.take();
        let is_closed = is_last && !self.is_over && ending.is_none() && self.close()?;
        if is_closed {
            let options = self.sizes.options(&self.machine);
            let opened = Store::open_on(self.machine.clone(), &options);
            let store = opened.map_err(Failure::of("opening a closed shop"))?;
            let all = self.commits.of.len();
            return self.commits.judge(&look(&store)?, (all, all)).map(drop);
        }
        let end = self.random.pick(&[End::PowerLoss, End::Kill]);
        let crash = ending.unwrap_or_else(|| self.machine.crash_now(end));
        let noted = crash.noted;
        self.machine.kill();
        let recovered = self.recover(|recovery| recovery.run(crash, 2))?;
        let Some(Recovered { store, machine }) = recovered else {
            return Err(Failure::new("a shop that has to open does not"));
        };
        let last = self.commits.judge(&look(&store)?, noted)?;
        self.commits.of.truncate(last);
        self.report.trace = Random(self.report.trace ^ self.machine.trace()).next();
        self.trees = Trees::of(|name| store.tree(name)).map_err(Failure::of("a tree"))?;
        self.store = store;
        SlowLog::end(&self.machine)?;
        self.machine = machine;
        (self.synced, self.full_for, self.is_over) = (last, 0, false);
        Ok(())
    }

    /// Closes the store. Returns whether it is closed: the log may have failed.
    fn close(&mut self) -> Outcome<bool> {
        self.machine.set_disk_full(false);
        self.machine.set_log_full(false);
        self.machine.clear_faults();
        self.machine.clear_log_fault();
        match self.store.clone().close() {
            Ok(()) => Ok(true),
            Err(Error::Log(_) | Error::Poisoned(_)) => Ok(false),
            Err(error) => Err(Failure::of("closing")(error)),
        }
    }
}

/// Checks the rules of a shop. Returns the count and the number of each client's newest commit.
fn look(store: &Store) -> Outcome<Vec<(u64, u64)>> {
    let read = || -> vellum::Result<_> {
        let trees = Trees::of(|name| store.tree(name))?;
        let view = store.begin()?;
        let mut found = Vec::new();
        for client in 0..CLIENTS {
            let value = view.get(&trees.books, &client_key(client))?;
            let value = value.as_deref();
            let number = number_in(value.and_then(|value| value.get(8..)));
            found.push((number_in(value), number));
        }
        Ok((trees, view, found))
    };
    let (trees, view, found) = read().map_err(Failure::of("looking at a shop"))?;
    audit(&view, &trees, false)?.map_err(Failure::of("an audit"))?;
    Ok(found)
}
