/* Transactions, snapshots and cursors; prints "ok" at the end. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store.h"

static void transactions(vellum_store *store)
{
	vellum_tree *tree = open_tree(store), *second;
	vellum_transaction *one, *two;
	char bytes[3];
	size_t length;

	CHECK(vellum_tree_open(store, "second", VELLUM_CREATE, &second) == 0);
	one = begin_transaction(store, 0);
	CHECK(put_in(one, tree, "x", 1, VELLUM_NEW) == 0 && put_in(one, second, "y", 2, 0) == 0);
	CHECK(put_in(one, tree, "x", 1, VELLUM_NEW) == -EEXIST);
	CHECK(number_in(one, tree, "x") == 1);
	/* Another transaction sees neither change before the commit, nor afterwards. */
	two = begin_transaction(store, VELLUM_SNAPSHOT);
	CHECK(number_in(two, tree, "x") == -1);
	CHECK(vellum_transaction_commit(one) == 0);
	CHECK(number_in(two, tree, "x") == -1 && number_in(two, second, "y") == -1);
	CHECK(vellum_transaction_commit(two) == 0);
	CHECK(vellum_transaction_commit(one) == -EALREADY);
	CHECK(put_in(one, tree, "x", 3, 0) == -EALREADY);
	CHECK(vellum_transaction_remove(one, tree, "x", 1) == -EALREADY);
	CHECK(vellum_transaction_get(one, tree, "x", 1, NULL, 0, &length) == -EALREADY);
	vellum_transaction_close(one);
	vellum_transaction_close(two);

	/* Of two that read and change the same entry, one commits. */
	one = begin_transaction(store, VELLUM_BUFFERED);
	two = begin_transaction(store, VELLUM_NO_SYNC);
	CHECK(put_in(one, tree, "x", number_in(one, tree, "x") + 1, 0) == 0);
	CHECK(put_in(two, tree, "x", number_in(two, tree, "x") + 1, 0) == 0);
	CHECK(vellum_transaction_commit(one) == 0);
	CHECK(vellum_transaction_commit(two) == -EAGAIN);
	vellum_transaction_close(one);
	vellum_transaction_close(two);

	/* One that is closed changes nothing. Part of a value, and its length. */
	one = begin_transaction(store, 0);
	CHECK(number_in(one, tree, "x") == 2);
	CHECK(vellum_transaction_remove(one, tree, "x", 1) == 0);
	CHECK(vellum_transaction_remove(one, tree, "x", 1) == -ENODATA);
	CHECK(vellum_transaction_put(one, tree, "long", 4, "abcdef", 6, 0) == 0);
	CHECK(vellum_transaction_get(one, tree, "long", 4, bytes, 3, &length) == 0);
	CHECK(length == 6 && memcmp(bytes, "abc", 3) == 0);
	CHECK(vellum_transaction_get(one, tree, "long", 4, NULL, 0, &length) == 0 && length == 6);
	vellum_transaction_close(one);
	one = begin_transaction(store, 0);
	CHECK(number_in(one, tree, "x") == 2 && number_in(one, tree, "long") == -1);

	/* Wrong arguments. */
	CHECK(vellum_transaction_begin(NULL, 0, &two) == -EINVAL);
	CHECK(vellum_transaction_begin(store, 0, NULL) == -EINVAL);
	CHECK(vellum_transaction_begin(store, VELLUM_NEW, &two) == -EINVAL);
	CHECK(vellum_transaction_begin(store, VELLUM_BUFFERED | VELLUM_NO_SYNC, &two) == -EINVAL);
	CHECK(vellum_transaction_get(NULL, tree, "x", 1, NULL, 0, &length) == -EINVAL);
	CHECK(vellum_transaction_get(one, NULL, "x", 1, NULL, 0, &length) == -EINVAL);
	CHECK(vellum_transaction_get(one, tree, NULL, 1, NULL, 0, &length) == -EINVAL);
	CHECK(vellum_transaction_get(one, tree, "x", 1, NULL, 1, &length) == -EINVAL);
	CHECK(vellum_transaction_get(one, tree, "x", 1, NULL, 0, NULL) == -EINVAL);
	CHECK(vellum_transaction_put(NULL, tree, "x", 1, "v", 1, 0) == -EINVAL);
	CHECK(vellum_transaction_put(one, tree, "x", 1, NULL, 1, 0) == -EINVAL);
	CHECK(vellum_transaction_put(one, tree, "x", 1, "v", 1, VELLUM_CREATE) == -EINVAL);
	CHECK(vellum_transaction_remove(one, tree, NULL, 1) == -EINVAL);
	CHECK(vellum_transaction_remove(NULL, tree, "x", 1) == -EINVAL);
	CHECK(vellum_transaction_commit(NULL) == -EINVAL);
	CHECK(vellum_transaction_commit(one) == 0);
	vellum_transaction_close(one);
	vellum_transaction_close(NULL);
	vellum_tree_close(tree);
	vellum_tree_close(second);
}

/* The keys that a cursor returns from now on, one letter each, up to the end. */
static const char *letters(const vellum_cursor *cursor, int is_forward)
{
	static char found[100];
	struct vellum_entry entry;
	size_t count = 0;
	int error;

	while (!(error = is_forward ? vellum_cursor_next(cursor, &entry)
				    : vellum_cursor_previous(cursor, &entry))) {
		CHECK(entry.key_length == 1 && count < sizeof found - 1);
		found[count++] = *(const char *)entry.key;
	}
	CHECK(error == -ENODATA);
	found[count] = '\0';
	return found;
}

enum view { TREE, SNAPSHOT, TRANSACTION };

/* A range of letters; "" for no bound. */
static struct vellum_range range_of(const char *start, const char *end, uint32_t flags)
{
	struct vellum_range range = { .flags = flags };

	if (*start) {
		range.start = start;
		range.start_length = strlen(start);
	}
	if (*end) {
		range.end = end;
		range.end_length = strlen(end);
	}
	return range;
}

static vellum_cursor *scan(enum view view, const vellum_tree *tree,
			   const vellum_snapshot *snapshot,
			   const vellum_transaction *transaction, struct vellum_range range)
{
	vellum_cursor *cursor = NULL;

	if (view == TREE)
		CHECK(vellum_tree_scan(tree, &range, &cursor) == 0);
	else if (view == SNAPSHOT)
		CHECK(vellum_snapshot_scan(snapshot, tree, &range, &cursor) == 0);
	else
		CHECK(vellum_transaction_scan(transaction, tree, &range, &cursor) == 0);
	CHECK(cursor);
	return cursor;
}

/* Ranges of a tree, a snapshot and a transaction, in both directions. */
static void ranges(vellum_store *store)
{
	static const struct {
		const char *start, *end;
		uint32_t flags;
		const char *keys, *back;
	} cases[] = {
		{ "", "", 0, "abcdefgh", "hgfedcba" },
		{ "c", "f", 0, "cde", "edc" },
		{ "c", "f", VELLUM_WITHOUT_START, "de", "ed" },
		{ "c", "f", VELLUM_WITH_END, "cdef", "fedc" },
		{ "c", "f", VELLUM_WITHOUT_START | VELLUM_WITH_END, "def", "fed" },
		{ "bb", "ee", 0, "cde", "edc" },
		{ "g", "", 0, "gh", "hg" },
		{ "", "b", VELLUM_WITH_END, "ab", "ba" },
		{ "f", "c", 0, "", "" },
		{ "c", "c", 0, "", "" },
		{ "c", "c", VELLUM_WITH_END, "c", "c" },
		{ "x", "", 0, "", "" },
		{ "d", "", VELLUM_PREFIX, "d", "d" },
		{ "dd", "", VELLUM_PREFIX, "", "" },
		{ "\xff\xff", "", VELLUM_PREFIX, "", "" },
		{ "", "", VELLUM_PREFIX, "abcdefgh", "hgfedcba" },
	};
	vellum_tree *tree;
	vellum_snapshot *snapshot;
	vellum_transaction *transaction;
	vellum_cursor *cursor;
	struct vellum_entry entry;
	uint64_t removed = 9;

	CHECK(vellum_tree_open(store, "letters", VELLUM_CREATE, &tree) == 0);
	for (const char *letter = "hbdfgcea"; *letter; letter++)
		CHECK(vellum_tree_put(tree, letter, 1, letter, 1, 0) == 0);
	CHECK(vellum_snapshot_open(store, &snapshot) == 0);
	transaction = begin_transaction(store, 0);
	for (enum view view = TREE; view <= TRANSACTION; view++) {
		for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
			cursor = scan(view, tree, snapshot, transaction,
				      range_of(cases[i].start, cases[i].end, cases[i].flags));
			CHECK(strcmp(letters(cursor, 1), cases[i].keys) == 0);
			/* From the end back, and from the beginning on again. */
			CHECK(vellum_cursor_next(cursor, &entry) == -ENODATA);
			CHECK(strcmp(letters(cursor, 0), cases[i].back) == 0);
			CHECK(vellum_cursor_previous(cursor, &entry) == -ENODATA);
			CHECK(strcmp(letters(cursor, 1), cases[i].keys) == 0);
			vellum_cursor_close(cursor);
			cursor = scan(view, tree, snapshot, transaction,
				      range_of(cases[i].start, cases[i].end, cases[i].flags));
			CHECK(strcmp(letters(cursor, 0), cases[i].back) == 0);
			vellum_cursor_close(cursor);
		}
		/* Turns on the way. */
		cursor = scan(view, tree, snapshot, transaction, range_of("", "", 0));
		for (const char *step = "abcdcdefghgf"; *step; step++) {
			int is_back = *step != 'a' && step[-1] > *step;

			CHECK((is_back ? vellum_cursor_previous(cursor, &entry)
				       : vellum_cursor_next(cursor, &entry)) == 0);
			CHECK(entry.key_length == 1 && *(const char *)entry.key == *step);
			CHECK(entry.value_length == 1 && *(const char *)entry.value == *step);
		}
		vellum_cursor_close(cursor);
	}
	CHECK(vellum_transaction_remove_range(transaction, tree, NULL, NULL) == 0);
	cursor = scan(TRANSACTION, tree, snapshot, transaction, range_of("", "", 0));
	CHECK(strcmp(letters(cursor, 1), "") == 0);
	vellum_cursor_close(cursor);
	vellum_transaction_close(transaction);

	transaction = begin_transaction(store, VELLUM_NO_SYNC);
	struct vellum_range middle = range_of("c", "f", 0);

	CHECK(vellum_transaction_remove_range(transaction, tree, &middle, &removed) == 0);
	CHECK(removed == 3);
	CHECK(vellum_transaction_commit(transaction) == 0);
	vellum_transaction_close(transaction);
	cursor = scan(TREE, tree, NULL, NULL, range_of("", "", 0));
	CHECK(strcmp(letters(cursor, 1), "abfgh") == 0);
	vellum_cursor_close(cursor);
	/* The snapshot sees what it saw, and its cursor outlives it. */
	cursor = scan(SNAPSHOT, tree, snapshot, NULL, range_of("", "", 0));
	vellum_snapshot_close(snapshot);
	CHECK(strcmp(letters(cursor, 1), "abcdefgh") == 0);
	vellum_cursor_close(cursor);
	vellum_tree_close(tree);
}

#define MANY 3000

/* Key number i of a large tree. */
static const char *key_of(int i)
{
	static char key[20];

	snprintf(key, sizeof key, "key %06d", i);
	return key;
}

/* Many entries, in several leaves, while the tree and the transaction change. */
static void large_scans(vellum_store *store)
{
	vellum_tree *tree;
	vellum_snapshot *snapshot;
	vellum_transaction *one;
	vellum_cursor *of_tree, *of_snapshot, *of_one;
	struct vellum_entry entry;
	int number;

	CHECK(vellum_tree_open(store, "many", VELLUM_CREATE, &tree) == 0);
	one = begin_transaction(store, VELLUM_NO_SYNC);
	for (int i = 0; i < MANY; i++)
		CHECK(put_in(one, tree, key_of(i), i, VELLUM_NEW) == 0);
	CHECK(vellum_transaction_commit(one) == 0);
	vellum_transaction_close(one);
	CHECK(vellum_snapshot_open(store, &snapshot) == 0);
	one = begin_transaction(store, VELLUM_NO_SYNC);
	of_tree = scan(TREE, tree, snapshot, one, range_of("", "", 0));
	of_snapshot = scan(SNAPSHOT, tree, snapshot, one, range_of("", "", 0));
	of_one = scan(TRANSACTION, tree, snapshot, one, range_of("", "", 0));
	for (int i = 0; i < MANY; i++) {
		CHECK(vellum_cursor_next(of_snapshot, &entry) == 0);
		CHECK(entry.value_length == sizeof number);
		memcpy(&number, entry.value, sizeof number);
		CHECK(number == i && memcmp(entry.key, key_of(i), entry.key_length) == 0);
		CHECK(vellum_cursor_next(of_one, &entry) == 0);
		memcpy(&number, entry.value, sizeof number);
		CHECK(number == (i % 2 ? i + MANY : i));
		/* The transaction sees its change of the next entry, the tree does not. */
		if (i % 2 == 0)
			CHECK(put_in(one, tree, key_of(i + 1), i + 1 + MANY, 0) == 0);
		if (i % 3 == 0) {
			/* Others remove every third entry just before the cursor of the tree. */
			CHECK(vellum_tree_remove(tree, key_of(i), strlen(key_of(i))) == 0);
			continue;
		}
		CHECK(vellum_cursor_next(of_tree, &entry) == 0);
		memcpy(&number, entry.value, sizeof number);
		CHECK(number == i);
	}
	CHECK(vellum_cursor_next(of_tree, &entry) == -ENODATA);
	CHECK(vellum_cursor_next(of_snapshot, &entry) == -ENODATA);
	CHECK(vellum_cursor_next(of_one, &entry) == -ENODATA);
	/* Back, with longer and longer reads. */
	for (int i = MANY - 1; i >= 0; i--) {
		CHECK(vellum_cursor_previous(of_snapshot, &entry) == 0);
		CHECK(memcmp(entry.key, key_of(i), entry.key_length) == 0);
	}
	CHECK(vellum_cursor_previous(of_snapshot, &entry) == -ENODATA);
	/* It has passed entries that were removed since it began. */
	CHECK(vellum_transaction_commit(one) == -EAGAIN);
	CHECK(vellum_cursor_next(of_one, &entry) == -EALREADY);
	CHECK(vellum_cursor_previous(of_one, &entry) == -EALREADY);
	vellum_cursor_close(of_one);
	vellum_cursor_close(of_tree);
	vellum_cursor_close(of_snapshot);
	vellum_transaction_close(one);
	vellum_snapshot_close(snapshot);
	vellum_tree_close(tree);
}

/* A transaction depends on what its cursors have passed, and not on what is far ahead. */
static void dependence(vellum_store *store)
{
	vellum_tree *tree, *other;
	vellum_transaction *one;
	vellum_cursor *cursor;
	struct vellum_entry entry;

	CHECK(vellum_tree_open(store, "many", 0, &tree) == 0);
	CHECK(vellum_tree_open(store, "second", 0, &other) == 0);
	for (int is_far = 0; is_far < 2; is_far++) {
		one = begin_transaction(store, VELLUM_NO_SYNC);
		CHECK(vellum_transaction_scan(one, tree, NULL, &cursor) == 0);
		for (int i = 0; i < 10; i++)
			CHECK(vellum_cursor_next(cursor, &entry) == 0);
		vellum_cursor_close(cursor);
		/* A key that was not there, between those that it has passed, or far behind. */
		CHECK(vellum_tree_put(tree, is_far ? "key 002000x" : "key 000001x", 11, "", 0, 0)
		      == 0);
		CHECK(put_in(one, other, "z", 1, 0) == 0);
		CHECK(vellum_transaction_commit(one) == (is_far ? 0 : -EAGAIN));
		vellum_transaction_close(one);
	}
	vellum_tree_close(tree);
	vellum_tree_close(other);
}

static void savepoints(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	vellum_transaction *one = begin_transaction(store, 0), *two;
	vellum_cursor *cursor;
	struct vellum_range of_p = { "p", 1, .flags = VELLUM_PREFIX };
	struct vellum_entry entry;
	uint64_t first = 0, second = 0, foreign = 0;

	CHECK(put_in(one, tree, "p1", 1, 0) == 0);
	CHECK(vellum_transaction_savepoint(one, &first) == 0 && first != 0);
	CHECK(put_in(one, tree, "p1", 2, 0) == 0 && put_in(one, tree, "p2", 2, 0) == 0);
	CHECK(vellum_transaction_savepoint(one, &second) == 0 && second != first);
	CHECK(vellum_transaction_remove_range(one, tree, &of_p, NULL) == 0);
	CHECK(vellum_transaction_scan(one, tree, &of_p, &cursor) == 0);
	CHECK(vellum_cursor_next(cursor, &entry) == -ENODATA);
	CHECK(number_in(one, tree, "p1") == -1);
	CHECK(vellum_transaction_rollback(one, second) == 0);
	CHECK(number_in(one, tree, "p1") == 2 && number_in(one, tree, "p2") == 2);
	/* The cursor is after the last entry; it sees what has come back before it. */
	CHECK(vellum_cursor_previous(cursor, &entry) == 0);
	CHECK(entry.key_length == 2 && memcmp(entry.key, "p2", 2) == 0);
	/* A savepoint stays when the transaction returns to it, and those after it are gone. */
	CHECK(vellum_transaction_rollback(one, first) == 0);
	CHECK(vellum_transaction_rollback(one, second) == -EINVAL);
	CHECK(strstr(vellum_last_error(), "savepoint"));
	CHECK(vellum_transaction_rollback(one, 0) == -EINVAL);
	CHECK(put_in(one, tree, "p3", 3, 0) == 0);
	CHECK(vellum_transaction_rollback(one, first) == 0);
	CHECK(number_in(one, tree, "p1") == 1 && number_in(one, tree, "p3") == -1);
	CHECK(vellum_cursor_previous(cursor, &entry) == 0);
	CHECK(memcmp(entry.key, "p1", 2) == 0);
	vellum_cursor_close(cursor);

	two = begin_transaction(store, 0);
	CHECK(vellum_transaction_savepoint(two, &foreign) == 0);
	CHECK(vellum_transaction_rollback(one, foreign) == -EINVAL);
	vellum_transaction_close(two);
	CHECK(vellum_transaction_savepoint(NULL, &foreign) == -EINVAL);
	CHECK(vellum_transaction_savepoint(one, NULL) == -EINVAL);
	CHECK(vellum_transaction_rollback(NULL, first) == -EINVAL);
	CHECK(vellum_transaction_commit(one) == 0);
	CHECK(vellum_transaction_savepoint(one, &first) == -EALREADY);
	CHECK(vellum_transaction_rollback(one, first) == -EALREADY);
	CHECK(vellum_transaction_remove_range(one, tree, NULL, NULL) == -EALREADY);
	CHECK(vellum_transaction_scan(one, tree, NULL, &cursor) == -EALREADY);
	vellum_transaction_close(one);
	vellum_tree_close(tree);
}

/* A savepoint that was released, and those after it, are gone; the changes stay. */
static void releases(vellum_store *store)
{
	static const unsigned char bytes[PART / 2];
	vellum_tree *tree = open_tree(store);
	vellum_transaction *one = begin_transaction(store, 0), *two;
	uint64_t first = 0, second = 0, third = 0;

	CHECK(vellum_transaction_savepoint(one, &first) == 0);
	CHECK(vellum_transaction_savepoint(one, &second) == 0);
	CHECK(put_in(one, tree, "r1", 1, 0) == 0);
	CHECK(vellum_transaction_savepoint(one, &third) == 0);
	CHECK(vellum_transaction_release(one, second) == 0);
	CHECK(vellum_transaction_release(one, second) == -EINVAL);
	CHECK(strstr(vellum_last_error(), "savepoint"));
	CHECK(vellum_transaction_release(one, third) == -EINVAL);
	CHECK(vellum_transaction_rollback(one, third) == -EINVAL);
	CHECK(number_in(one, tree, "r1") == 1);
	CHECK(vellum_transaction_rollback(one, first) == 0);
	CHECK(number_in(one, tree, "r1") == -1);
	two = begin_transaction(store, 0);
	CHECK(vellum_transaction_release(two, first) == -EINVAL);
	vellum_transaction_close(two);
	CHECK(vellum_transaction_release(NULL, first) == -EINVAL);
	CHECK(vellum_transaction_release(one, first) == 0);
	/* Together, the values that are replaced are larger than what a transaction may keep. */
	for (int i = 0; i < 10; i++) {
		CHECK(vellum_transaction_savepoint(one, &first) == 0);
		CHECK(vellum_transaction_put(one, tree, "r2", 2, bytes, sizeof bytes, 0) == 0);
		CHECK(vellum_transaction_release(one, first) == 0);
	}
	vellum_transaction_close(one);
	one = begin_transaction(store, 0);
	CHECK(vellum_transaction_savepoint(one, &first) == 0);
	CHECK(vellum_transaction_commit(one) == 0);
	CHECK(vellum_transaction_release(one, first) == -EALREADY);
	vellum_transaction_close(one);
	vellum_tree_close(tree);
}

/* Values longer than the pool, in snapshots, transactions and cursors. */
static void long_values(vellum_store *store)
{
	vellum_tree *tree;
	vellum_snapshot *snapshot;
	vellum_transaction *one;
	vellum_cursor *cursor;
	struct vellum_entry entry;
	unsigned char bytes[1000];
	size_t length = 0;

	CHECK(vellum_tree_open(store, "long values", VELLUM_CREATE, &tree) == 0);
	CHECK(vellum_tree_put(tree, "a", 1, NULL, 0, 0) == 0);
	write_value(tree, "b", 100000, 1);
	write_value(tree, "c", LENGTH, 2);
	CHECK(vellum_tree_put(tree, "d", 1, "d", 1, 0) == 0);
	CHECK(vellum_snapshot_open(store, &snapshot) == 0);
	one = begin_transaction(store, 0);
	CHECK(vellum_transaction_get(one, tree, "c", 1, bytes, sizeof bytes, &length) == 0);
	CHECK(length == LENGTH && is_made(bytes, 0, sizeof bytes, 2));
	CHECK(vellum_tree_remove(tree, "c", 1) == 0);
	write_value(tree, "c", LENGTH, 3);
	CHECK(vellum_snapshot_get(snapshot, tree, "c", 1, bytes, sizeof bytes, &length) == 0);
	CHECK(length == LENGTH && is_made(bytes, 0, sizeof bytes, 2));
	CHECK(vellum_snapshot_get(snapshot, tree, "b", 1, bytes, 10, &length) == 0);
	CHECK(length == 100000 && is_made(bytes, 0, 10, 1));
	CHECK(vellum_snapshot_get(snapshot, tree, "none", 4, NULL, 0, &length) == -ENODATA);

	for (enum view view = TREE; view <= TRANSACTION; view++) {
		cursor = scan(view, tree, snapshot, one, range_of("", "", 0));
		CHECK(vellum_cursor_next(cursor, &entry) == 0);
		CHECK(entry.value && entry.value_length == 0);
		CHECK(vellum_cursor_next(cursor, &entry) == 0 && entry.value_length == 100000);
		CHECK(is_made(entry.value, 0, 100000, 1));
		CHECK(vellum_cursor_next(cursor, &entry) == 0);
		CHECK(*(const char *)entry.key == 'c');
		CHECK(!entry.value && entry.value_length == LENGTH);
		CHECK(vellum_cursor_next(cursor, &entry) == 0 && entry.value_length == 1);
		CHECK(vellum_cursor_next(cursor, &entry) == -ENODATA);
		CHECK(vellum_cursor_previous(cursor, &entry) == 0 && entry.value_length == 1);
		CHECK(vellum_cursor_previous(cursor, &entry) == 0);
		CHECK(*(const char *)entry.key == 'c');
		CHECK(!entry.value && entry.value_length == LENGTH);
		CHECK(vellum_cursor_previous(cursor, &entry) == 0 && entry.value_length == 100000);
		vellum_cursor_close(cursor);
	}
	vellum_transaction_close(one);
	vellum_snapshot_close(snapshot);
	vellum_tree_close(tree);
}

/* Wrong arguments, and handles of another store or of one that is closed. */
static void misuse_of_views(vellum_store *store)
{
	vellum_tree *tree = open_tree(store), *foreign;
	vellum_store *other = open_store("other", VELLUM_CREATE);
	vellum_snapshot *snapshot = NULL;
	vellum_transaction *one = begin_transaction(store, 0);
	vellum_cursor *cursor = NULL, *cursors[3];
	struct vellum_range range = { .flags = VELLUM_CREATE };
	struct vellum_entry entry = { .key_length = 77 };
	size_t length = 77;

	foreign = open_tree(other);
	CHECK(vellum_tree_put(foreign, "a", 1, "b", 1, 0) == 0);
	CHECK(vellum_snapshot_open(NULL, &snapshot) == -EINVAL);
	CHECK(vellum_snapshot_open(store, NULL) == -EINVAL);
	CHECK(vellum_snapshot_open(store, &snapshot) == 0);
	CHECK(vellum_snapshot_get(NULL, tree, "x", 1, NULL, 0, &length) == -EINVAL);
	CHECK(vellum_snapshot_get(snapshot, NULL, "x", 1, NULL, 0, &length) == -EINVAL);
	CHECK(vellum_snapshot_get(snapshot, tree, NULL, 1, NULL, 0, &length) == -EINVAL);
	CHECK(vellum_snapshot_get(snapshot, tree, "x", 1, NULL, 1, &length) == -EINVAL);
	CHECK(vellum_snapshot_get(snapshot, tree, "x", 1, NULL, 0, NULL) == -EINVAL);
	CHECK(vellum_snapshot_get(snapshot, foreign, "x", 1, NULL, 0, &length) == -EINVAL);
	CHECK(strstr(vellum_last_error(), "another store") && length == 77);
	CHECK(vellum_tree_scan(NULL, NULL, &cursor) == -EINVAL);
	CHECK(vellum_tree_scan(tree, NULL, NULL) == -EINVAL);
	CHECK(vellum_snapshot_scan(NULL, tree, NULL, &cursor) == -EINVAL);
	CHECK(vellum_snapshot_scan(snapshot, NULL, NULL, &cursor) == -EINVAL);
	CHECK(vellum_snapshot_scan(snapshot, tree, NULL, NULL) == -EINVAL);
	CHECK(vellum_snapshot_scan(snapshot, foreign, NULL, &cursor) == -EINVAL);
	CHECK(vellum_transaction_scan(NULL, tree, NULL, &cursor) == -EINVAL);
	CHECK(vellum_transaction_scan(one, NULL, NULL, &cursor) == -EINVAL);
	CHECK(vellum_transaction_scan(one, tree, NULL, NULL) == -EINVAL);
	CHECK(vellum_transaction_scan(one, foreign, NULL, &cursor) == -EINVAL);
	CHECK(vellum_transaction_remove_range(NULL, tree, NULL, NULL) == -EINVAL);
	CHECK(vellum_transaction_remove_range(one, NULL, NULL, NULL) == -EINVAL);
	CHECK(vellum_transaction_remove_range(one, foreign, NULL, NULL) == -EINVAL);
	CHECK(vellum_tree_scan(tree, &range, &cursor) == -EINVAL);
	range = (struct vellum_range){ "a", 1, "b", 1, .flags = VELLUM_PREFIX };
	CHECK(vellum_tree_scan(tree, &range, &cursor) == -EINVAL);
	range = (struct vellum_range){ "a", 1, .flags = VELLUM_PREFIX | VELLUM_WITH_END };
	CHECK(vellum_tree_scan(tree, &range, &cursor) == -EINVAL);
	range = (struct vellum_range){ .start_length = 1 };
	CHECK(vellum_snapshot_scan(snapshot, tree, &range, &cursor) == -EINVAL);
	range = (struct vellum_range){ "a", 1, "b", SIZE_MAX, .flags = 0 };
	CHECK(vellum_transaction_scan(one, tree, &range, &cursor) == -EINVAL);
	range = (struct vellum_range){ .reserved = 1 };
	CHECK(vellum_transaction_remove_range(one, tree, &range, NULL) == -EINVAL && !cursor);
	CHECK(vellum_cursor_next(NULL, &entry) == -EINVAL);
	CHECK(vellum_cursor_previous(NULL, &entry) == -EINVAL);
	CHECK(vellum_tree_scan(tree, NULL, &cursor) == 0);
	CHECK(vellum_cursor_next(cursor, NULL) == -EINVAL && entry.key_length == 77);
	CHECK(vellum_cursor_next(cursor, &entry) == 0);
	vellum_cursor_close(cursor);
	vellum_cursor_close(NULL);
	vellum_snapshot_close(snapshot);
	vellum_snapshot_close(NULL);

	/* A cursor whose transaction was closed without a commit. */
	CHECK(vellum_transaction_scan(one, tree, NULL, &cursor) == 0);
	CHECK(vellum_cursor_next(cursor, &entry) == 0);
	vellum_transaction_close(one);
	CHECK(vellum_cursor_next(cursor, &entry) == -EALREADY);
	vellum_cursor_close(cursor);

	/* They outlive their store, with and without entries that were read ahead. */
	CHECK(vellum_tree_put(foreign, "c", 1, "d", 1, 0) == 0);
	one = begin_transaction(other, 0);
	CHECK(put_in(one, foreign, "b", 1, 0) == 0 && vellum_snapshot_open(other, &snapshot) == 0);
	for (enum view view = TREE; view <= TRANSACTION; view++)
		cursors[view] = scan(view, foreign, snapshot, one, range_of("", "", 0));
	CHECK(vellum_cursor_next(cursors[SNAPSHOT], &entry) == 0);
	CHECK(vellum_store_close(other) == 0);
	for (enum view view = TREE; view <= TRANSACTION; view++) {
		CHECK(vellum_cursor_next(cursors[view], &entry) == -ESHUTDOWN);
		CHECK(vellum_cursor_previous(cursors[view], &entry) == -ESHUTDOWN);
	}
	CHECK(vellum_tree_scan(foreign, NULL, &cursor) == -ESHUTDOWN);
	CHECK(vellum_snapshot_scan(snapshot, foreign, NULL, &cursor) == -ESHUTDOWN);
	CHECK(vellum_snapshot_get(snapshot, foreign, "a", 1, NULL, 0, &length) == -ESHUTDOWN);
	CHECK(vellum_transaction_remove_range(one, foreign, NULL, NULL) == -ESHUTDOWN);
	vellum_tree_close(foreign);
	vellum_snapshot_close(snapshot);
	vellum_transaction_close(one);
	for (enum view view = TREE; view <= TRANSACTION; view++)
		vellum_cursor_close(cursors[view]);
	vellum_tree_close(tree);
}

/* The child of a fork frees its parent's handles, and the parent goes on with them. */
static void in_a_child(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	vellum_snapshot *snapshot;
	vellum_transaction *one;
	vellum_cursor *cursors[3];
	struct vellum_entry entry;
	int status;
	pid_t child;

	CHECK(vellum_tree_put(tree, "a", 1, "before", 6, 0) == 0);
	one = begin_transaction(store, VELLUM_NO_SYNC);
	CHECK(vellum_snapshot_open(store, &snapshot) == 0);
	CHECK(put_in(one, tree, "z", 1, 0) == 0);
	for (enum view view = TREE; view <= TRANSACTION; view++) {
		cursors[view] = scan(view, tree, snapshot, one, range_of("a", "b", 0));
		CHECK(vellum_cursor_next(cursors[view], &entry) == 0);
	}
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		vellum_snapshot_close(snapshot);
		vellum_transaction_close(one);
		for (enum view view = TREE; view <= TRANSACTION; view++)
			vellum_cursor_close(cursors[view]);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(vellum_tree_put(tree, "a", 1, "after", 5, 0) == 0);
	for (enum view view = TREE; view <= TRANSACTION; view++) {
		CHECK(vellum_cursor_next(cursors[view], &entry) == -ENODATA);
		CHECK(vellum_cursor_previous(cursors[view], &entry) == 0);
		CHECK(entry.value_length == (view == SNAPSHOT ? 6 : 5) || view == TRANSACTION);
		vellum_cursor_close(cursors[view]);
	}
	CHECK(vellum_transaction_commit(one) == -EAGAIN);
	vellum_transaction_close(one);
	vellum_snapshot_close(snapshot);
	vellum_tree_close(tree);
}

struct counting {
	const vellum_cursor *cursor;
	int count;
};

/* Takes entries until there are none. */
static void *count_entries(void *argument)
{
	struct counting *counting = argument;
	struct vellum_entry entry;
	int error;

	while (!(error = vellum_cursor_next(counting->cursor, &entry)))
		counting->count++;
	CHECK(error == -ENODATA);
	return NULL;
}

/* Threads share a cursor of a transaction that another thread changes. */
static void shared_cursors(vellum_store *store)
{
	vellum_tree *tree;
	vellum_transaction *one = begin_transaction(store, VELLUM_NO_SYNC);
	vellum_cursor *cursor;
	struct counting counting[2];
	pthread_t threads[2];

	CHECK(vellum_tree_open(store, "shared", VELLUM_CREATE, &tree) == 0);
	for (int i = 0; i < MANY; i++)
		CHECK(put_in(one, tree, key_of(i), i, 0) == 0);
	CHECK(vellum_transaction_scan(one, tree, NULL, &cursor) == 0);
	for (int i = 0; i < 2; i++) {
		counting[i] = (struct counting){ cursor, 0 };
		CHECK(pthread_create(&threads[i], NULL, count_entries, &counting[i]) == 0);
	}
	/* Changes of entries that are there add none. */
	for (int i = 0; i < MANY; i++)
		CHECK(put_in(one, tree, key_of(i), -i, 0) == 0);
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(counting[0].count + counting[1].count == MANY);
	vellum_cursor_close(cursor);
	CHECK(vellum_transaction_commit(one) == 0);
	vellum_transaction_close(one);
	vellum_tree_close(tree);
}

int main(void)
{
	vellum_store *store = open_store("main", VELLUM_CREATE);

	transactions(store);
	ranges(store);
	large_scans(store);
	dependence(store);
	savepoints(store);
	releases(store);
	long_values(store);
	misuse_of_views(store);
	in_a_child(store);
	shared_cursors(store);
	CHECK(vellum_store_close(store) == 0);
	puts("ok");
	return 0;
}
