/*
 * Stores: ordered maps from keys to values in a file larger than memory, values of any length.
 *
 * This header is the manual of the part of libvellum that has stores. Link with -lvellum. The part
 * that has Morsels is described in vellum_morsel.h.
 *
 * A store is a file of named trees. A tree maps keys to values, both strings of bytes. The store
 * reads pages into a pool of memory. The program chooses the pool's size, and the store never
 * exceeds it. A writer and a reader pass a value piece by piece, so a value may be longer than the
 * pool.
 *
 *     struct vellum_store_options options = { .pool_bytes = 64 << 20, .flags = VELLUM_CREATE };
 *     vellum_store *store;
 *     vellum_tree *tree;
 *     vellum_writer *writer;
 *     int error = vellum_store_open("films.vellum", &options, &store);
 *     if (error)
 *         errx(1, "%s", vellum_last_error());
 *     error = vellum_tree_open(store, "films", VELLUM_CREATE, &tree);
 *     if (!error) {
 *         error = vellum_writer_open(tree, "Metropolis", 10, &writer);
 *         while (!error && (count = read(file, buffer, sizeof buffer)) > 0)
 *             error = vellum_writer_write(writer, buffer, count);
 *         if (!error && count == 0)
 *             error = vellum_writer_finish(writer, 0);
 *         ...
 *         vellum_writer_close(writer);
 *         vellum_tree_close(tree);
 *     }
 *     error = vellum_store_close(store);
 *
 * Errors. A function that returns int returns 0 or a negative errno value. Every function returns
 * -EINVAL for invalid arguments, NULL among them. Each function lists its other errors. A function
 * that works on a store may also return
 *
 * -ESHUTDOWN  the store was closed
 * -EBADMSG    the file is damaged
 * -EIO        reading or writing the file failed, or the store refuses changes after an earlier
 *             failure to write; if the system returned another number, that number
 * -ENOBUFS    other threads use all of the pool
 *
 * and a function that changes a store also -EROFS, -ENOSPC. vellum_last_error() returns the same
 * error in words, and says what to do. After an error nothing has changed, and the function has not
 * written its result.
 *
 * Handles. The caller frees each handle exactly once, with the function that ends in _close, and no
 * thread uses the handle during or after that call. Otherwise several threads may use one handle at
 * the same time; calls of one reader, writer, load, cursor or transaction wait for each other. A tree
 * does not need the handle of its store, and a reader, writer, load or cursor needs no other handle:
 * the caller may free handles in any order. vellum_store_close() ends the use of all of them: later
 * calls with the remaining handles return -ESHUTDOWN. The caller must still free those handles.
 *
 * Transactions. A transaction changes any number of entries of any number of trees, all or none.
 * It sees the store as it was when the transaction began, with its own changes. A change outside of
 * a transaction is atomic by itself. Of transactions that disagree, the first one to commit wins,
 * and the others are run again:
 *
 *     do {
 *         error = vellum_transaction_begin(store, 0, &transaction);
 *         if (error)
 *             break;
 *         error = move_money(transaction, accounts);
 *         if (!error)
 *             error = vellum_transaction_commit(transaction);
 *         vellum_transaction_close(transaction);
 *     } while (error == -EAGAIN);
 *
 * Bulk loads. A load is the fastest way to fill an empty tree. It takes the entries in the order of
 * the bytes of their keys, writes every page once, and full, and keeps the entries out of the log:
 *
 *     vellum_load *load = NULL;
 *     error = vellum_load_open(tree, &load);
 *     while (!error && next_film(films, &film))
 *         error = vellum_load_add(load, film.title, strlen(film.title), film.bytes, film.length);
 *     if (!error)
 *         error = vellum_load_finish(load);
 *     vellum_load_close(load);
 *
 * Backups. A backup is a copy of the store that is a store itself. It is made while threads use the
 * store. An increment has what changed since a backup; vellum_restore() joins both.
 *
 * Snapshots. A snapshot is a view of the store that does not change. It blocks no change.
 *
 * Cursors. A cursor moves over the entries of a range of keys, in the order of the bytes of the keys,
 * forward and backward. It reads a tree as it is, a snapshot, or a transaction:
 *
 *     struct vellum_range films_of_1927 = { "1927 ", 5, .flags = VELLUM_PREFIX };
 *     struct vellum_entry film;
 *     vellum_cursor *cursor = NULL;
 *     error = vellum_tree_scan(tree, &films_of_1927, &cursor);
 *     while (!error && !(error = vellum_cursor_next(cursor, &film)))
 *         printf("%.*s\n", (int)film.key_length, (const char *)film.key);
 *     vellum_cursor_close(cursor);
 *     if (error != -ENODATA)
 *         errx(1, "%s", vellum_last_error());
 *
 * The end of the process. exit() closes the stores that are open. A store that was not closed recovers
 * at its next opening from its log, whatever the process or the machine did: it has all that was
 * durable. With VELLUM_NO_LOG: if a process changes a store after its last vellum_store_sync() and is
 * then killed, or ends by _exit(), the store is unclean, and an unclean store does not open
 * (-EUCLEAN). The child of a fork must not use the handles of its parent. It may free readers,
 * writers, loads, cursors, snapshots, transactions and commits; the parent keeps its own.
 *
 * Keys have up to some thousand bytes, and the empty key is a key; values have up to 2^48 bytes.
 * Linux 5.10 and later, pages of 4 KiB.
 */
#ifndef VELLUM_H
#define VELLUM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open file of trees. */
typedef struct vellum_store vellum_store;

/* An ordered map of an open store. */
typedef struct vellum_tree vellum_tree;

/* Reads a value. */
typedef struct vellum_reader vellum_reader;

/* Writes a value. */
typedef struct vellum_writer vellum_writer;

/* Fills an empty tree. */
typedef struct vellum_load vellum_load;

/* Changes of entries, all or none. */
typedef struct vellum_transaction vellum_transaction;

/* A commit that may not be durable yet. */
typedef struct vellum_commit vellum_commit;

/* A view of the store that does not change. */
typedef struct vellum_snapshot vellum_snapshot;

/* A position among the entries of a range. */
typedef struct vellum_cursor vellum_cursor;

/* The values of keys that were looked up together. */
typedef struct vellum_values vellum_values;

/* Where other processes ask this one to back its store up, or to compact it. */
typedef struct vellum_control_socket vellum_control_socket;

/*
 * Flags. Each function names those that it takes; all others must be 0. The flag 8 asked for a log in
 * earlier versions; it is refused now.
 */
#define VELLUM_CREATE    1u /* create the store or the tree if it does not exist */
#define VELLUM_READ_ONLY 2u /* refuse changes; several processes may open a file read-only */
#define VELLUM_NEW       4u /* refuse a key that has a value, instead of replacing the value */
#define VELLUM_SNAPSHOT 16u /* snapshot isolation: others may change what was only read */
#define VELLUM_BUFFERED 32u /* a commit does not wait: a crash may take the last milliseconds */
#define VELLUM_NO_SYNC  64u /* durable with the next transaction that is, or the next sync */
#define VELLUM_PREFIX  128u /* a range: the keys that begin with the bytes of `start` */
#define VELLUM_WITHOUT_START 256u /* a range: without the key `start` itself */
#define VELLUM_WITH_END      512u /* a range: with the key `end` itself */
#define VELLUM_NO_LOG       1024u /* have no log, which lies in a folder next to the file otherwise */
#define VELLUM_FREE_LOST    2048u /* a check: free the pages that nothing refers to */
#define VELLUM_REPLACE      4096u /* replace a file of the name, when the new one is complete */
#define VELLUM_UNCHECKED    8192u /* do not read and check the new file */
#define VELLUM_READ_ALL    16384u /* an increment: read the store's pages that did not change, too */

/* Options of vellum_store_open(). */
struct vellum_store_options {
	uint64_t pool_bytes; /* memory for pages; 0: half of what the process may use */
	uint32_t flags;      /* VELLUM_READ_ONLY, or of VELLUM_CREATE and VELLUM_NO_LOG any */
	uint32_t reserved;   /* 0 */
};

/*
 * A range of keys. Where a function takes a range, NULL stands for all keys. Without flags the range
 * has the keys from `start` on that come before `end`. A bound that is NULL, with a length of 0, is
 * none: the range begins with the first key, or ends with the last one. A range whose start does not
 * come before its end has no keys. The functions copy the bounds.
 */
struct vellum_range {
	const void *start;
	size_t start_length;
	const void *end; /* NULL with VELLUM_PREFIX */
	size_t end_length;
	uint32_t flags;    /* VELLUM_PREFIX, or of VELLUM_WITHOUT_START and VELLUM_WITH_END any */
	uint32_t reserved; /* 0 */
};

/* An entry, in memory of its cursor. In a lookup of many keys, the caller's key, and its value. */
struct vellum_entry {
	const void *key;
	size_t key_length;
	const void *value; /* may be NULL: see vellum_cursor_next() and vellum_tree_multi_get() */
	size_t value_length;
};

/*
 * The reason for the last failed call of this thread, and what to do: UTF-8, "" before the first
 * failure. Valid until the next failed call of this thread, or until the thread ends. Never NULL.
 */
const char *vellum_last_error(void);

/*
 * Opens the store in a file. `options` may be NULL, which means that all of its members are 0.
 *
 * -ENOENT       there is no file, and the caller did not pass VELLUM_CREATE
 * -EBUSY        another process, or another handle, has the store open
 * -EUCLEAN      the store was not closed cleanly, and has no log or is opened with VELLUM_READ_ONLY:
 *               open it without that flag, or save what can be read by `vellum salvage`
 * -EMEDIUMTYPE  the file is not a store, or is a store of another version
 * -EINVAL       the pool is too small, or larger than the memory
 */
int vellum_store_open(const char *path, const struct vellum_store_options *options,
		      vellum_store **result);

/* Makes durable all changes that any thread made before the call. Changes may go on meanwhile. */
int vellum_store_sync(const vellum_store *store);

/*
 * Changes the size of the store's pool, in bytes, while threads use the store. Returns when the
 * pool's pages take no more memory than that, and the kernel has the rest. A pool never becomes larger
 * than it was when the store was opened: a program that wants to grow opens the store with the most
 * memory that it will ever have, which the pool takes only as it needs it, and shrinks the pool.
 *
 * -EINVAL   fewer than eight pages of a tree, or more than the store was opened with
 * -ENOBUFS  cursors and readers hold more memory, or changed pages cannot be written. The pool has the
 *           size that it had.
 */
int vellum_store_resize_pool(const vellum_store *store, uint64_t bytes);

/*
 * Makes everything durable, ends the use of the store's trees, readers and writers, unlocks the file
 * and frees the handle. Does nothing with NULL. The call frees the handle even if it fails; then
 * changes that were not durable before may be lost. It drops the values of unfinished writers, and
 * the entries of unfinished loads.
 */
int vellum_store_close(vellum_store *store);

/*
 * Opens the tree with this name, in UTF-8. Flag: VELLUM_CREATE.
 *
 * -ENOENT  the store has no such tree, and the caller did not pass VELLUM_CREATE
 */
int vellum_tree_open(const vellum_store *store, const char *name, uint32_t flags,
		     vellum_tree **result);

/* Frees a handle. Does nothing with NULL. The tree stays. */
void vellum_tree_close(vellum_tree *tree);

/*
 * Stores a value that is in memory, atomically. Flag: VELLUM_NEW. A pointer may be NULL if its
 * length is 0.
 *
 * -ENAMETOOLONG  the key is too long
 * -EEXIST        with VELLUM_NEW: the key has a value
 */
int vellum_tree_put(const vellum_tree *tree, const void *key, size_t key_length,
		    const void *value, size_t value_length, uint32_t flags);

/*
 * Removes a key and its value.
 *
 * -ENODATA  there is no such key
 */
int vellum_tree_remove(const vellum_tree *tree, const void *key, size_t key_length);

/*
 * Looks up the keys of `count` entries together, and gives each entry its value. Pages that are not
 * in memory are read at the same time, so this is faster than one lookup after the other. The keys may
 * be in any order, and there may be duplicates. Each value is one that its key had during the call.
 *
 *     struct vellum_entry films[2] = { { "Metropolis", 10 }, { "Nosferatu", 9 } };
 *     vellum_values *values;
 *     error = vellum_tree_multi_get(tree, films, 2, &values);
 *     if (!error) {
 *         ...
 *         vellum_values_close(values);
 *     }
 *
 * The bytes of the values are copies, and stay valid until vellum_values_close(), also if the store is
 * closed before. An empty value is not NULL. A value that is NULL with a length of 0 means that the
 * tree has no such key. A value that is longer than a quarter of the pool is NULL, too, and its length
 * is there: a reader reads it. The entries stay as they were if there is an error.
 *
 * -ENOMEM  there is no memory for copies of all values
 */
int vellum_tree_multi_get(const vellum_tree *tree, struct vellum_entry *entries, size_t count,
			  vellum_values **result);

/* Frees a handle. Does nothing with NULL. The bytes of the values are gone. */
void vellum_values_close(vellum_values *values);

/*
 * Begins to read the value of a key. The reader keeps the value that the key has now, even if a
 * thread changes or removes the key or the tree. Closing the reader gives the space of a removed
 * value back. The reader checks every byte before it returns it.
 *
 * A reader allocates a buffer of 1 MiB at most, and up to 4 MiB for a value that was written with a
 * much larger pool.
 *
 * -ENODATA  there is no such key
 */
int vellum_reader_open(const vellum_tree *tree, const void *key, size_t key_length,
		       vellum_reader **result);

/* Length of the value; 0 of NULL. */
uint64_t vellum_reader_length(const vellum_reader *reader);

/*
 * Reads on from the place where the last vellum_reader_read() ended; the first call reads from the
 * beginning. Puts `length` bytes into `buffer`, or fewer at the end of the value, and their number
 * into `count`: 0 at the end. After an error the next call reads from the same place.
 */
int vellum_reader_read(const vellum_reader *reader, void *buffer, size_t length, size_t *count);

/*
 * As vellum_reader_read(), but reads from the byte `offset`, and does not move the place of
 * vellum_reader_read(). Reads no bytes beyond the end.
 */
int vellum_reader_read_at(const vellum_reader *reader, uint64_t offset, void *buffer,
			  size_t length, size_t *count);

/* Frees a handle. Does nothing with NULL. */
void vellum_reader_close(vellum_reader *reader);

/*
 * Begins to write a value. vellum_writer_finish() gives the value to the key, atomically. Until then
 * the key keeps its old value, even if the process dies. The writer allocates a buffer of 256 KiB at
 * most, and no other thread waits for it.
 *
 * -ENAMETOOLONG  the key is too long
 */
int vellum_writer_open(const vellum_tree *tree, const void *key, size_t key_length,
		       vellum_writer **result);

/*
 * Appends bytes to the value. After an error the caller can only close the writer.
 *
 * -EFBIG     the value would be longer than 2^48 bytes
 * -EALREADY  the writer was finished
 */
int vellum_writer_write(const vellum_writer *writer, const void *bytes, size_t length);

/* Bytes written so far; 0 of NULL and of a finished writer. */
uint64_t vellum_writer_length(const vellum_writer *writer);

/*
 * Gives the value to the key. Replaces the key's old value, or refuses to with VELLUM_NEW. The call
 * finishes the writer even if it fails; then the key keeps its old value, and the new value is
 * dropped.
 *
 * -EEXIST    with VELLUM_NEW: the key has a value
 * -EALREADY  the writer was finished
 */
int vellum_writer_finish(const vellum_writer *writer, uint32_t flags);

/*
 * Frees a handle. Does nothing with NULL. If the writer is unfinished, drops the value and gives its
 * space back.
 */
void vellum_writer_close(vellum_writer *writer);

/*
 * Begins to fill an empty tree. vellum_load_finish() adds the entries to the tree, all of them
 * atomically. Until then the tree stays empty, even if the process dies. Meanwhile threads may use
 * the store, and other loads may fill the same tree: of those that are finished, the first one wins.
 * The load keeps a page for each level of the tree in memory of its own, and some hundred bytes for
 * each value that is longer than a quarter of the pool.
 *
 * -ENOTEMPTY  the tree has entries
 */
int vellum_load_open(const vellum_tree *tree, vellum_load **result);

/*
 * Adds an entry. Its key must come after the key of the entry before it, in the order of the bytes.
 * The load copies both, and the value may be longer than the pool. A pointer may be NULL if its length
 * is 0.
 *
 * An error ends the load: it gives its space back, and later calls, vellum_load_finish() among them,
 * return the same error. So a program may look at the result of vellum_load_finish() alone.
 *
 * -EINVAL        the key is equal to the one before it, or comes before it; vellum_last_error() has
 *                the key, and the number of the entry, from 0
 * -ENAMETOOLONG  the key is too long
 * -EALREADY      the load was finished
 */
int vellum_load_add(const vellum_load *load, const void *key, size_t key_length, const void *value,
		    size_t value_length);

/*
 * Adds the entries to the tree. They are durable after the next vellum_store_sync(), as other
 * changes. A load without entries changes nothing, and succeeds. The call finishes the load even if
 * it fails; then the tree has none of its entries, and their space is given back.
 *
 * -ENOTEMPTY  the tree has got entries since vellum_load_open()
 * -EALREADY   the load was finished
 */
int vellum_load_finish(const vellum_load *load);

/*
 * Frees a handle. Does nothing with NULL. If the load is unfinished, the call cancels it: the tree has
 * none of its entries, and their space is given back.
 */
void vellum_load_close(vellum_load *load);

/*
 * Makes a cursor for the entries of a range. The tree had each entry at the moment when the cursor
 * moved to it: the cursor sees the changes of this thread and of others.
 */
int vellum_tree_scan(const vellum_tree *tree, const struct vellum_range *range,
		     vellum_cursor **result);

/*
 * Moves to the next entry of the range, in the order of the keys, and puts it into `entry`. A new
 * cursor moves to the first one. After the last entry the function returns -ENODATA, as often as it
 * is called; vellum_cursor_previous() moves to the last entry then. The bytes of the entry stay
 * valid, and stay as they are, until a thread calls a function with this cursor again. An empty
 * value is not NULL.
 *
 * The value is NULL if it is longer than a quarter of the pool. Its length is there. A reader reads
 * such a value of a tree, and vellum_snapshot_get() or vellum_transaction_get() one of these.
 *
 * After an error the cursor stays where it is.
 *
 * -ENODATA   the range has no more entries
 * -EALREADY  the cursor's transaction has ended
 */
int vellum_cursor_next(const vellum_cursor *cursor, struct vellum_entry *entry);

/*
 * As vellum_cursor_next(), but moves to the previous entry; a new cursor moves to the last one.
 * Before the first entry the function returns -ENODATA, and vellum_cursor_next() moves to the first
 * entry then.
 */
int vellum_cursor_previous(const vellum_cursor *cursor, struct vellum_entry *entry);

/* Frees a handle. Does nothing with NULL. The bytes of its entry are gone. */
void vellum_cursor_close(vellum_cursor *cursor);

/*
 * Takes a snapshot: a view of the store as it is now, which later changes do not affect. While the
 * snapshot, or a cursor of it, is open, the store keeps in memory the values that others replace. If
 * these take too much memory, changes fail with -ENOMEM until old snapshots and transactions end.
 */
int vellum_snapshot_open(const vellum_store *store, vellum_snapshot **result);

/*
 * Puts the first `length` bytes of the value of a key into `buffer`, or all of them if there are
 * fewer, and the whole length of the value into `value_length`. A program that does not know the
 * length may ask with a `length` of 0. The tree must be one of the snapshot's store (-EINVAL).
 *
 * -ENODATA  there was no such key
 */
int vellum_snapshot_get(const vellum_snapshot *snapshot, const vellum_tree *tree, const void *key,
			size_t key_length, void *buffer, size_t length, size_t *value_length);

/* As vellum_tree_multi_get(), but the values are those that the snapshot sees. */
int vellum_snapshot_multi_get(const vellum_snapshot *snapshot, const vellum_tree *tree,
			      struct vellum_entry *entries, size_t count, vellum_values **result);

/*
 * Makes a cursor for the entries of a range, as the snapshot sees them. The cursor keeps the view of
 * the snapshot, also if the snapshot is closed before it. It reads up to 1 MiB of entries at a time
 * into memory of its own.
 */
int vellum_snapshot_scan(const vellum_snapshot *snapshot, const vellum_tree *tree,
			 const struct vellum_range *range, vellum_cursor **result);

/* Frees a handle. Does nothing with NULL. */
void vellum_snapshot_close(vellum_snapshot *snapshot);

/*
 * Begins a transaction. Flags: VELLUM_SNAPSHOT, and VELLUM_BUFFERED or VELLUM_NO_SYNC. Without
 * flags the transaction is serializable, and its commit returns when the transaction is durable.
 * While a transaction is open, the store keeps in memory the values that others replace. The trees
 * that its functions take must be of the transaction's store (-EINVAL).
 */
int vellum_transaction_begin(const vellum_store *store, uint32_t flags,
			     vellum_transaction **result);

/*
 * Puts the first `length` bytes of the value of a key into `buffer`, or all of them if there are
 * fewer, and the whole length of the value into `value_length`. A program that does not know the
 * length may ask with a `length` of 0.
 *
 * -ENODATA   there is no such key
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_get(const vellum_transaction *transaction, const vellum_tree *tree,
			   const void *key, size_t key_length, void *buffer, size_t length,
			   size_t *value_length);

/*
 * As vellum_tree_multi_get(), but the values are those that the transaction sees.
 *
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_multi_get(const vellum_transaction *transaction, const vellum_tree *tree,
				 struct vellum_entry *entries, size_t count,
				 vellum_values **result);

/*
 * Gives a key a value. Other threads see it after the commit. Flag: VELLUM_NEW.
 *
 * -ENAMETOOLONG, -EFBIG  the key or the value is too long
 * -E2BIG     the changes take more than a quarter of the pool
 * -EEXIST    with VELLUM_NEW: the key has a value
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_put(const vellum_transaction *transaction, const vellum_tree *tree,
			   const void *key, size_t key_length, const void *value,
			   size_t value_length, uint32_t flags);

/*
 * Removes a key and its value.
 *
 * -ENODATA   there is no such key
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_remove(const vellum_transaction *transaction, const vellum_tree *tree,
			      const void *key, size_t key_length);

/*
 * Removes all entries of a range, and puts their number into `removed`, which may be NULL. NULL as
 * the range stands for all keys.
 *
 * -E2BIG     the keys take more than what is left of a quarter of the pool: some of the entries may
 *            be removed in the transaction; return to a savepoint, or close the transaction
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_remove_range(const vellum_transaction *transaction,
				    const vellum_tree *tree, const struct vellum_range *range,
				    uint64_t *removed);

/*
 * Makes a cursor for the entries of a range, as the transaction sees them: the cursor sees the
 * changes that the transaction makes meanwhile, also ahead of the cursor. The handle of the
 * transaction may be closed before the cursor: the cursor returns -EALREADY then.
 *
 * A serializable transaction depends on the part of the range that the cursor has passed: on keys
 * that are not there, too. The cursor reads entries ahead, about as many as it has returned and at
 * most 256, and the transaction depends on them as well.
 *
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_scan(const vellum_transaction *transaction, const vellum_tree *tree,
			    const struct vellum_range *range, vellum_cursor **result);

/*
 * Sets a savepoint, to which vellum_transaction_rollback() returns, and puts its number into
 * `savepoint`. The number is never 0. There is no need to free it. While the transaction has a
 * savepoint, it keeps what its changes replace, which counts as its changes do, until
 * vellum_transaction_release().
 *
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_savepoint(const vellum_transaction *transaction, uint64_t *savepoint);

/*
 * Undoes the changes since a savepoint. The savepoint stays, and those after it are gone. What the
 * transaction has read counts still.
 *
 * -EINVAL    the savepoint is gone, or is of another transaction
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_rollback(const vellum_transaction *transaction, uint64_t savepoint);

/*
 * Forgets a savepoint and those after it. The changes stay. When the oldest savepoint goes, the
 * transaction gives back the memory of what its changes have replaced.
 *
 * -EINVAL    the savepoint is gone, or is of another transaction
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_release(const vellum_transaction *transaction, uint64_t savepoint);

/*
 * Makes all changes of the transaction, or none. The call ends the transaction even if it fails.
 *
 * -EAGAIN    another transaction has changed what this one has read, or, with VELLUM_SNAPSHOT,
 *            what it changes: nothing has changed; run the transaction again
 * -E2BIG     the changes are too many for the pool or the log: nothing has changed
 * -ENOMEM    open transactions keep too many old values: nothing has changed
 * -EIO and numbers of the system: the changes may be made, and a crash may take them
 * -EALREADY  the transaction has ended
 */
int vellum_transaction_commit(const vellum_transaction *transaction);

/*
 * A function that is told that a commit is durable (`error` is 0), or that it is unknown whether it
 * will be: then `error` is a negative errno value, and vellum_last_error() returns the words within
 * the function.
 *
 * The function runs on a thread of the store that does nothing else, or within the call that commits:
 * it must take no lock that a thread holds while it commits. It may use the store, and free its
 * argument. A function that takes its time delays other functions and vellum_store_close(), and nothing
 * else; it must not wait for another one. It must return: no exception of C++ and no longjmp() may
 * leave it.
 */
typedef void (*vellum_durable)(void *argument, int error);

/*
 * Commits as vellum_transaction_commit(), and returns before the transaction is durable. So one thread
 * can have thousands of commits under way. Other threads see the changes when the call returns.
 *
 * If the call returns 0, it has `durable` called exactly once, with `argument`: perhaps before the
 * call returns, and at the latest before a later vellum_store_close() returns, also with an error,
 * unless such a function has called that. It is called also if the log fails, and when exit() closes the
 * store. If the call returns an error, `durable` is never called.
 * A process that ends without exit(), and the child of a fork, call nothing.
 *
 * This asks for durability even with VELLUM_BUFFERED or VELLUM_NO_SYNC. A store without a log syncs
 * its file within the call.
 *
 * The errors are those of vellum_transaction_commit() for which nothing has changed. What makes it
 * unknown whether the changes are durable is for `durable`.
 */
int vellum_transaction_commit_then(const vellum_transaction *transaction, vellum_durable durable,
				   void *argument);

/* The same, with a handle to wait for in place of a function. */
int vellum_transaction_commit_start(const vellum_transaction *transaction, vellum_commit **result);

/*
 * Waits until the commit is durable, for some milliseconds at most: 0 only looks, and a negative
 * number stands for any time. Several threads may wait for one commit. A commit that ended before
 * its store was closed keeps its end.
 *
 * -EINPROGRESS  the time is over
 * -EIO and numbers of the system: the changes are made, and a crash may take them
 */
int vellum_commit_wait(const vellum_commit *commit, int milliseconds);

/* Frees a handle. Does nothing with NULL. The commit goes on. */
void vellum_commit_close(vellum_commit *commit);

/* Frees a handle. Does nothing with NULL. Without a commit, the changes are dropped. */
void vellum_transaction_close(vellum_transaction *transaction);

/*
 * A function that is told how far a long call is: `done` of `total`, bytes of a backup or a restore,
 * pages of a check or a compaction. NULL stands for none. If it returns another number than 0, the
 * call ends with -ECANCELED. The function must not change the store, and must return.
 */
typedef int (*vellum_progress)(void *argument, uint64_t done, uint64_t total);

/* Options of vellum_store_backup() and vellum_restore(). */
struct vellum_backup_options {
	const char *since;         /* make an increment to this backup, or this increment; may be NULL */
	uint64_t bytes_per_second; /* read no faster; 0: no limit */
	vellum_progress progress; /* may be NULL */
	void *argument;            /* of the progress function */
	uint32_t flags;            /* of VELLUM_REPLACE, VELLUM_UNCHECKED, VELLUM_READ_ALL any */
	uint32_t reserved;         /* 0 */
};

/*
 * Copies the store to a new file, while threads use it. The copy is a store: closed, with the state
 * of one moment, and with everything that had changed when this was called. With `since` the new
 * file is an increment, which has what changed since that file was made. If that is the newest backup
 * of a store with a log, no more of the store than this is read; with VELLUM_READ_ALL all is. `options`
 * may be NULL, which means that all of its members are 0. The new file gets its name when it is
 * complete and durable.
 *
 * -EEXIST     there is a file of this name, and the caller did not pass VELLUM_REPLACE
 * -EBUSY      another backup of the store is under way
 * -ECANCELED  the progress function has ended the call
 * -EBADMSG    the store is damaged, or `since` is no backup of it
 * -EINVAL     VELLUM_READ_ALL without `since`
 */
int vellum_store_backup(const vellum_store *store, const char *path,
			const struct vellum_backup_options *options);

/*
 * Makes a store of a backup and any number of increments, in their order. Of the options, `since` and
 * `bytes_per_second` must be 0, and VELLUM_READ_ALL must not be set. The new file gets its name when it
 * is complete and durable.
 *
 * -EEXIST     there is a file of this name, and the caller did not pass VELLUM_REPLACE
 * -ECANCELED  the progress function has ended the call
 * -EBADMSG    a file is damaged, or does not follow the one before it
 */
int vellum_restore(const char *path, const char *const *backups, size_t count,
		   const struct vellum_backup_options *options);

/*
 * Has damaged pages that were not written since the newest backup repaired from that, until the next
 * backup of the store is complete: from a full backup and `count` - 1 increments, in their order. A
 * reader does not notice. A later checkpoint writes the page, at the latest when the store is closed; a
 * sync does not. The store must have had a log ever since. A full backup without increments is read as
 * a whole for this. The files stay open.
 *
 * -EBADMSG    a file is damaged, does not follow the one before it, or is not the newest backup
 * -EINVAL     the store has no log
 * -ECANCELED  the progress function has ended the call
 */
int vellum_store_repair_from(const vellum_store *store, const char *const *backups, size_t count,
			     vellum_progress progress, void *argument);

/* What a check found. */
struct vellum_check {
	uint64_t pages_checked; /* pages of 4 KiB that are in use */
	uint64_t lost_pages;    /* pages of 4 KiB that nothing refers to */
};

/*
 * Reads and checks every page. Changes wait until the check ends. Flag: VELLUM_FREE_LOST. A crash
 * while a tree is dropped leaves pages that nothing refers to, which take space.
 *
 * -EBADMSG    the store is damaged: vellum_last_error() names the first place; nothing was freed
 * -ECANCELED  the progress function has ended the call
 */
int vellum_store_check(const vellum_store *store, uint32_t flags, vellum_progress progress,
		       void *argument, struct vellum_check *result);

/*
 * Returns the free space of the store's file to the file system, while threads use the store: moves
 * pages to the front of the file, and cuts the end off.
 *
 * -EBUSY      another compaction of the store is under way
 * -ECANCELED  the progress function has ended the call; a later one goes on
 */
int vellum_store_compact(const vellum_store *store, vellum_progress progress, void *argument);

/*
 * Lets other processes of the same user, and of root, have this one work for them while it has the
 * store open: `vellum backup`, `compact`, `stat` and `resize-pool`. `path` is the path of the store's
 * file; the socket is `path`.control. Threads of the library do the work, with the rights of this
 * process. The socket does not keep the store open.
 *
 * -EINVAL  the file is not that of this store
 * -EROFS   the store is open read-only: other processes back it up themselves
 * -EEXIST  there is another file by the socket's name
 */
int vellum_control_socket_open(const vellum_store *store, const char *path,
			       vellum_control_socket **result);

/*
 * Ends what other processes have asked for, waits for that, and removes the socket. A progress
 * function must not call it. Does nothing with NULL.
 */
void vellum_control_socket_close(vellum_control_socket *socket);

#ifdef __cplusplus
}
#endif

#endif
