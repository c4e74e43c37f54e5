/* Every function of vellum.h on a store in the current folder; prints "ok" at the end. */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vellum.h"

#define LAST_ERROR vellum_last_error
#include "check.h"

#define POOL   (1 << 20)
#define PART   100000
#define LENGTH (240ull * PART) /* 23 times the pool */

static vellum_store *open_store(const char *name, uint32_t flags)
{
	struct vellum_store_options options = { .pool_bytes = POOL, .flags = flags };
	vellum_store *store = NULL;

	CHECK(vellum_store_open(name, &options, &store) == 0 && store);
	return store;
}

static vellum_tree *open_tree(const vellum_store *store)
{
	vellum_tree *tree = NULL;

	CHECK(vellum_tree_open(store, "t", VELLUM_CREATE, &tree) == 0 && tree);
	return tree;
}

/* The bytes of a value from `offset` on. */
static void make(unsigned char *bytes, uint64_t offset, size_t length, uint64_t seed)
{
	for (size_t i = 0; i < length; i++) {
		uint64_t mixed = ((offset + i) / 8 + seed) * 0x9e3779b97f4a7c15ull;

		bytes[i] = mixed >> 13 >> (offset + i) % 8;
	}
}

static int is_made(const unsigned char *bytes, uint64_t offset, size_t length, uint64_t seed)
{
	unsigned char *expected = malloc(length ? length : 1);
	int same;

	CHECK(expected);
	make(expected, offset, length, seed);
	same = memcmp(bytes, expected, length) == 0;
	free(expected);
	return same;
}

static vellum_writer *begin(const vellum_tree *tree, const char *key, uint64_t length,
			    uint64_t seed)
{
	unsigned char *part = malloc(PART);
	vellum_writer *writer = NULL;

	CHECK(part && vellum_writer_open(tree, key, strlen(key), &writer) == 0);
	for (uint64_t done = 0; done < length; done += PART) {
		size_t count = length - done < PART ? length - done : PART;

		make(part, done, count, seed);
		CHECK(vellum_writer_write(writer, part, count) == 0);
	}
	CHECK(vellum_writer_length(writer) == length);
	free(part);
	return writer;
}

static void write_value(const vellum_tree *tree, const char *key, uint64_t length, uint64_t seed)
{
	vellum_writer *writer = begin(tree, key, length, seed);

	CHECK(vellum_writer_finish(writer, 0) == 0);
	vellum_writer_close(writer);
}

static vellum_reader *reader_of(const vellum_tree *tree, const char *key)
{
	vellum_reader *reader = NULL;

	CHECK(vellum_reader_open(tree, key, strlen(key), &reader) == 0 && reader);
	return reader;
}

static void expect(const vellum_reader *reader, uint64_t length, uint64_t seed)
{
	unsigned char *part = malloc(PART);
	size_t count = 1;

	CHECK(part && vellum_reader_length(reader) == length);
	for (uint64_t done = 0; count > 0; done += count) {
		CHECK(vellum_reader_read(reader, part, PART, &count) == 0);
		CHECK(count == (length - done < PART ? length - done : PART));
		CHECK(is_made(part, done, count, seed));
	}
	free(part);
}

static void streams(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	uint64_t lengths[] = { 0, 1, 100, 5000, 300000, LENGTH };
	unsigned char bytes[1000];
	vellum_reader *reader, *old;
	vellum_writer *writer;
	size_t count;

	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		write_value(tree, "key", lengths[i], i);
		reader = reader_of(tree, "key");
		expect(reader, lengths[i], i);
		vellum_reader_close(reader);
	}
	reader = reader_of(tree, "key");
	for (uint64_t offset = LENGTH - 1; offset > 100; offset = offset / 3) {
		size_t most = LENGTH - offset < sizeof bytes ? LENGTH - offset : sizeof bytes;

		CHECK(vellum_reader_read_at(reader, offset, bytes, sizeof bytes, &count) == 0);
		CHECK(count == most && is_made(bytes, offset, count, 5));
	}
	CHECK(vellum_reader_read_at(reader, LENGTH, bytes, 1, &count) == 0 && count == 0);
	CHECK(vellum_reader_read_at(reader, UINT64_MAX, bytes, 1, &count) == 0 && count == 0);
	/* Its position has not changed: it is at the beginning. */
	expect(reader, LENGTH, 5);

	/* The reader keeps its value, even if the key changes. */
	old = reader_of(tree, "key");
	writer = begin(tree, "key", LENGTH, 9);
	CHECK(vellum_writer_finish(writer, VELLUM_NEW) == -EEXIST);
	vellum_writer_close(writer);
	write_value(tree, "key", LENGTH, 10);
	CHECK(vellum_tree_remove(tree, "key", 3) == 0);
	CHECK(vellum_reader_open(tree, "key", 3, &reader) == -ENODATA);
	expect(old, LENGTH, 5);
	vellum_reader_close(old);
	vellum_reader_close(reader);

	/* A writer that is closed before it is finished stores nothing. */
	vellum_writer_close(begin(tree, "key", LENGTH, 1));
	CHECK(vellum_reader_open(tree, "key", 3, &reader) == -ENODATA);
	writer = begin(tree, "key", LENGTH, 2);
	CHECK(vellum_writer_finish(writer, VELLUM_NEW) == 0);
	vellum_writer_close(writer);
	CHECK(vellum_store_sync(store) == 0);

	/* The pool shrinks, and grows again. The value is longer than it is. */
	CHECK(vellum_store_resize_pool(store, POOL / 2) == 0);
	CHECK(vellum_reader_open(tree, "key", 3, &reader) == 0);
	vellum_reader_close(reader);
	CHECK(vellum_store_resize_pool(store, POOL) == 0);
	CHECK(vellum_store_resize_pool(store, 2 * POOL) == -EINVAL);
	CHECK(vellum_store_resize_pool(store, 4096) == -EINVAL);
	CHECK(vellum_store_resize_pool(NULL, POOL) == -EINVAL);
	vellum_tree_close(tree);
}

static void entries(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	unsigned char *large = malloc(3 * POOL);
	vellum_reader *reader;
	char bytes[10];
	size_t count;

	CHECK(vellum_tree_put(tree, "a", 1, "one", 3, 0) == 0);
	CHECK(vellum_tree_put(tree, "a", 1, "two", 3, VELLUM_NEW) == -EEXIST);
	CHECK(vellum_tree_put(tree, "a", 1, "three", 5, 0) == 0);
	CHECK(vellum_tree_put(tree, NULL, 0, NULL, 0, VELLUM_NEW) == 0);
	reader = reader_of(tree, "a");
	CHECK(vellum_reader_read(reader, bytes, sizeof bytes, &count) == 0 && count == 5);
	CHECK(memcmp(bytes, "three", 5) == 0);
	vellum_reader_close(reader);
	CHECK(vellum_tree_remove(tree, "", 0) == 0);
	CHECK(vellum_tree_remove(tree, "", 0) == -ENODATA);
	CHECK(strstr(vellum_last_error(), "no such key"));

	/* A value that is longer than the pool. */
	CHECK(large);
	make(large, 0, 3 * POOL, 7);
	CHECK(vellum_tree_put(tree, "large", 5, large, 3 * POOL, VELLUM_NEW) == 0);
	CHECK(vellum_tree_put(tree, "large", 5, large, 3 * POOL, VELLUM_NEW) == -EEXIST);
	free(large);
	reader = reader_of(tree, "large");
	expect(reader, 3 * POOL, 7);
	vellum_reader_close(reader);
	vellum_tree_close(tree);
}

/* Wrong arguments, and calls in the wrong order. */
static void misuse(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	struct vellum_store_options options = { .flags = 128 };
	vellum_store *other = store;
	vellum_tree *none = NULL;
	vellum_reader *reader = NULL;
	vellum_writer *writer = NULL;
	char *long_key = calloc(1, 100000);
	char byte = 0;
	size_t count = 77;

	CHECK(vellum_store_open(NULL, NULL, &other) == -EINVAL);
	CHECK(vellum_store_open("x", NULL, NULL) == -EINVAL);
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = VELLUM_CREATE | VELLUM_READ_ONLY;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = VELLUM_CREATE | 8u;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = VELLUM_NO_LOG | VELLUM_READ_ONLY;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.flags = 0;
	options.reserved = 1;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL);
	options.reserved = 0;
	options.pool_bytes = 1;
	CHECK(vellum_store_open("main", &options, &other) == -EBUSY);
	CHECK(vellum_store_open("none", NULL, &other) == -ENOENT);
	options.flags = VELLUM_CREATE;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL && other == store);
	options.pool_bytes = UINT64_MAX;
	CHECK(vellum_store_open("x", &options, &other) == -EINVAL && other == store);
	CHECK(vellum_store_sync(NULL) == -EINVAL && vellum_store_close(NULL) == 0);

	CHECK(vellum_tree_open(NULL, "t", 0, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, NULL, 0, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, "\xff", 0, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, "t", VELLUM_NEW, &none) == -EINVAL);
	CHECK(vellum_tree_open(store, "t", 0, NULL) == -EINVAL);
	CHECK(vellum_tree_open(store, "none", 0, &none) == -ENOENT && !none);
	CHECK(strstr(vellum_last_error(), "none"));
	vellum_tree_close(NULL);
	CHECK(vellum_tree_put(NULL, "k", 1, "v", 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, NULL, 1, "v", 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, "k", 1, NULL, 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, "k", SIZE_MAX, "v", 1, 0) == -EINVAL);
	CHECK(vellum_tree_put(tree, "k", 1, "v", 1, VELLUM_CREATE) == -EINVAL);
	CHECK(long_key && vellum_tree_put(tree, long_key, 100000, "v", 1, 0) == -ENAMETOOLONG);
	CHECK(vellum_tree_remove(NULL, "k", 1) == -EINVAL);

	CHECK(vellum_reader_open(NULL, "a", 1, &reader) == -EINVAL);
	CHECK(vellum_reader_open(tree, "a", 1, NULL) == -EINVAL);
	CHECK(vellum_reader_open(tree, "none", 4, &reader) == -ENODATA && !reader);
	CHECK(vellum_reader_length(NULL) == 0);
	CHECK(vellum_reader_read(NULL, &byte, 1, &count) == -EINVAL);
	CHECK(vellum_reader_read_at(NULL, 0, &byte, 1, &count) == -EINVAL);
	reader = reader_of(tree, "a");
	CHECK(vellum_reader_read(reader, NULL, 1, &count) == -EINVAL);
	CHECK(vellum_reader_read(reader, &byte, 1, NULL) == -EINVAL);
	CHECK(vellum_reader_read(reader, &byte, SIZE_MAX, &count) == -EINVAL && count == 77);
	CHECK(vellum_reader_read(reader, NULL, 0, &count) == 0 && count == 0);
	CHECK(vellum_reader_read(reader, &byte, 1, &count) == 0 && count == 1 && byte == 't');
	vellum_reader_close(reader);
	vellum_reader_close(NULL);

	CHECK(vellum_writer_open(NULL, "k", 1, &writer) == -EINVAL);
	CHECK(vellum_writer_open(tree, "k", 1, NULL) == -EINVAL);
	CHECK(vellum_writer_open(tree, long_key, 100000, &writer) == -ENAMETOOLONG && !writer);
	CHECK(vellum_writer_write(NULL, "v", 1) == -EINVAL);
	CHECK(vellum_writer_finish(NULL, 0) == -EINVAL);
	CHECK(vellum_writer_length(NULL) == 0);
	CHECK(vellum_writer_open(tree, "k", 1, &writer) == 0);
	CHECK(vellum_writer_write(writer, NULL, 1) == -EINVAL);
	CHECK(vellum_writer_write(writer, NULL, 0) == 0);
	CHECK(vellum_writer_write(writer, "v", 1) == 0);
	CHECK(vellum_writer_finish(writer, VELLUM_CREATE) == -EINVAL);
	CHECK(vellum_writer_finish(writer, VELLUM_NEW) == 0);
	CHECK(vellum_writer_finish(writer, 0) == -EALREADY);
	CHECK(vellum_writer_write(writer, "v", 1) == -EALREADY);
	CHECK(vellum_writer_length(writer) == 0);
	vellum_writer_close(writer);
	vellum_writer_close(NULL);
	vellum_tree_close(tree);
	free(long_key);
}

static vellum_transaction *begin_transaction(const vellum_store *store, uint32_t flags)
{
	vellum_transaction *transaction = NULL;

	CHECK(vellum_transaction_begin(store, flags, &transaction) == 0 && transaction);
	return transaction;
}

/* The number that a key has in a transaction; -1 if it has none. */
static int number_in(const vellum_transaction *transaction, const vellum_tree *tree,
		     const char *key)
{
	size_t length = 99;
	int number = 0;
	int error = vellum_transaction_get(transaction, tree, key, strlen(key), &number,
					   sizeof number, &length);

	if (error == -ENODATA)
		return -1;
	CHECK(error == 0 && length == sizeof number);
	return number;
}

static int put_in(const vellum_transaction *transaction, const vellum_tree *tree,
		  const char *key, int number, uint32_t flags)
{
	return vellum_transaction_put(transaction, tree, key, strlen(key), &number,
				      sizeof number, flags);
}

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
	vellum_transaction *one = begin_transaction(store, VELLUM_NO_SYNC);
	vellum_cursor *cursors[3];
	struct vellum_entry entry;
	int status;
	pid_t child;

	CHECK(vellum_tree_put(tree, "a", 1, "before", 6, 0) == 0);
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

/* What was committed is there after a process that did not close its store. */
static void recovery(void)
{
	vellum_store *store;
	vellum_transaction *one;
	vellum_tree *tree;
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		store = open_store("logged", VELLUM_CREATE);
		tree = open_tree(store);
		one = begin_transaction(store, 0);
		CHECK(put_in(one, tree, "x", 5, 0) == 0 && vellum_transaction_commit(one) == 0);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	store = open_store("logged", 0);
	tree = open_tree(store);
	one = begin_transaction(store, 0);
	CHECK(number_in(one, tree, "x") == 5);
	/* It outlives its store. */
	CHECK(vellum_store_close(store) == 0);
	CHECK(put_in(one, tree, "x", 6, 0) == -ESHUTDOWN);
	CHECK(vellum_transaction_commit(one) == -ESHUTDOWN);
	vellum_transaction_close(one);
	vellum_tree_close(tree);
}

struct shared {
	const vellum_reader *reader;
	const vellum_tree *tree;
	int number;
};

/* Reads anywhere, and writes a value of its own. */
static void *work(void *argument)
{
	struct shared *shared = argument;
	unsigned char bytes[5000];
	char key[20];
	size_t count;

	for (int round = 0; round < 50; round++) {
		uint64_t offset = (round * 7919ull + shared->number * 131ull) * 4001 % LENGTH;

		CHECK(vellum_reader_read_at(shared->reader, offset, bytes, sizeof bytes, &count)
		      == 0);
		CHECK(is_made(bytes, offset, count, 3));
	}
	snprintf(key, sizeof key, "thread %d", shared->number);
	write_value(shared->tree, key, 2 * POOL, shared->number);
	return NULL;
}

static void threads(vellum_store *store)
{
	vellum_tree *tree = open_tree(store);
	vellum_reader *reader;
	struct shared shared[4];
	pthread_t threads[4];
	char key[20];

	write_value(tree, "shared", LENGTH, 3);
	reader = reader_of(tree, "shared");
	for (int i = 0; i < 4; i++) {
		shared[i] = (struct shared){ reader, tree, i };
		CHECK(pthread_create(&threads[i], NULL, work, &shared[i]) == 0);
	}
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	vellum_reader_close(reader);
	for (int i = 0; i < 4; i++) {
		snprintf(key, sizeof key, "thread %d", i);
		reader = reader_of(tree, key);
		expect(reader, 2 * POOL, i);
		vellum_reader_close(reader);
	}
	vellum_tree_close(tree);
}

/* Handles that outlive their store. */
static void after_close(void)
{
	const char *keys[] = { "short", "whole", "pieces" };
	uint64_t lengths[] = { 10, 5000, LENGTH };
	vellum_store *store = open_store("closed", VELLUM_CREATE), *again;
	vellum_tree *tree = open_tree(store), *other;
	vellum_reader *readers[3], *reader;
	vellum_writer *writer, *late;
	unsigned char bytes[100];
	size_t count;

	for (int i = 0; i < 3; i++) {
		write_value(tree, keys[i], lengths[i], i);
		readers[i] = reader_of(tree, keys[i]);
	}
	writer = begin(tree, "new", LENGTH, 1);
	CHECK(vellum_store_close(store) == 0);
	again = open_store("closed", 0);
	for (int i = 0; i < 3; i++) {
		CHECK(vellum_reader_length(readers[i]) == lengths[i]);
		CHECK(vellum_reader_read(readers[i], bytes, 100, &count) == -ESHUTDOWN);
		CHECK(vellum_reader_read_at(readers[i], 5, bytes, 1, &count) == -ESHUTDOWN);
	}
	CHECK(strstr(vellum_last_error(), "closed"));
	CHECK(vellum_writer_finish(writer, 0) == -ESHUTDOWN);
	CHECK(vellum_reader_open(tree, "short", 5, &reader) == -ESHUTDOWN);
	CHECK(vellum_writer_open(tree, "short", 5, &late) == -ESHUTDOWN);
	CHECK(vellum_tree_put(tree, "k", 1, "v", 1, 0) == -ESHUTDOWN);
	/* The tree first: what was made of it needs it no more. */
	vellum_tree_close(tree);
	vellum_writer_close(writer);
	for (int i = 0; i < 3; i++)
		vellum_reader_close(readers[i]);
	other = open_tree(again);
	CHECK(vellum_reader_open(other, "new", 3, &reader) == -ENODATA);
	for (int i = 0; i < 3; i++) {
		reader = reader_of(other, keys[i]);
		expect(reader, lengths[i], i);
		vellum_reader_close(reader);
	}
	vellum_tree_close(other);
	CHECK(vellum_store_close(again) == 0);
}

static void read_only(void)
{
	vellum_store *store = open_store("closed", VELLUM_READ_ONLY);
	vellum_store *second = open_store("closed", VELLUM_READ_ONLY);
	vellum_tree *tree;
	vellum_reader *reader;
	vellum_writer *writer;

	CHECK(vellum_tree_open(store, "other", VELLUM_CREATE, &tree) == -EROFS);
	CHECK(vellum_tree_open(store, "t", 0, &tree) == 0);
	CHECK(vellum_tree_put(tree, "k", 1, "v", 1, 0) == -EROFS);
	CHECK(vellum_writer_open(tree, "k", 1, &writer) == -EROFS);
	reader = reader_of(tree, "pieces");
	expect(reader, LENGTH, 2);
	vellum_reader_close(reader);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0 && vellum_store_close(second) == 0);
}

static int count_calls(void *argument, uint64_t done, uint64_t total)
{
	int *left = argument;

	CHECK(done <= total || total == 0);
	return --*left == 0;
}

static int keep_total(void *argument, uint64_t done, uint64_t total)
{
	uint64_t *kept = argument;

	CHECK(done <= total);
	*kept = total;
	return 0;
}

static void expect_number(const char *name, const char *number)
{
	vellum_store *store = open_store(name, 0);
	vellum_tree *tree = open_tree(store);
	vellum_reader *reader = reader_of(tree, "number");
	char found[10];
	size_t count;

	CHECK(vellum_reader_read(reader, found, sizeof found, &count) == 0);
	CHECK(count == strlen(number) && memcmp(found, number, count) == 0);
	vellum_reader_close(reader);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

static void maintenance(void)
{
	vellum_store *store = open_store("kept", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	const char *backups[] = { "full", "one" };
	int left = 1000000;
	struct vellum_backup_options options = { .progress = count_calls, .argument = &left };
	struct vellum_check check;
	struct vellum_backup_options more = { .progress = keep_total };
	vellum_control_socket *socket;
	struct stat before, after;
	uint64_t changed, all;

	write_value(tree, "long", LENGTH, 1);
	CHECK(vellum_tree_put(tree, "number", 6, "one", 3, 0) == 0);
	CHECK(vellum_store_backup(store, "full", NULL) == 0);
	CHECK(vellum_store_backup(store, "full", NULL) == -EEXIST);
	CHECK(vellum_tree_put(tree, "number", 6, "two", 3, 0) == 0);
	options.since = "full";
	CHECK(vellum_store_backup(store, "one", &options) == 0 && left < 1000000);
	more.since = "one";
	more.argument = &changed;
	CHECK(vellum_store_backup(store, "next", &more) == 0);
	more.since = "next";
	more.flags = VELLUM_READ_ALL;
	more.argument = &all;
	CHECK(vellum_store_backup(store, "whole", &more) == 0);
	CHECK(changed < LENGTH && LENGTH < all);
	CHECK(vellum_store_repair_from(store, backups, 2, NULL, NULL) == -EBADMSG);
	backups[0] = "last";
	more.since = NULL;
	CHECK(vellum_store_backup(store, "last", &more) == -EINVAL);
	more.flags = 0;
	CHECK(vellum_store_backup(store, "last", &more) == 0);
	CHECK(vellum_store_repair_from(store, backups, 1, keep_total, &all) == 0 && LENGTH < all);
	CHECK(vellum_store_repair_from(store, backups, 0, NULL, NULL) == -EINVAL);
	CHECK(vellum_store_repair_from(store, NULL, 1, NULL, NULL) == -EINVAL);
	CHECK(vellum_store_repair_from(NULL, backups, 1, NULL, NULL) == -EINVAL);
	CHECK(vellum_store_repair_from(store, backups, 1, count_calls, &(int){ 1 }) == -ECANCELED);
	backups[0] = "full";
	options.since = NULL;
	left = 1;
	options.flags = VELLUM_REPLACE;
	CHECK(vellum_store_backup(store, "full", &options) == -ECANCELED);
	options.flags = VELLUM_UNCHECKED;
	options.bytes_per_second = 1ull << 40;
	left = 1000000;
	CHECK(vellum_store_backup(store, "third", &options) == 0);
	options.flags = 1;
	CHECK(vellum_store_backup(store, "other", &options) == -EINVAL);
	options.flags = 0;
	options.reserved = 1;
	CHECK(vellum_store_backup(store, "other", &options) == -EINVAL);
	CHECK(vellum_store_backup(NULL, "other", NULL) == -EINVAL);
	CHECK(vellum_store_backup(store, NULL, NULL) == -EINVAL);

	CHECK(vellum_store_check(store, 0, NULL, NULL, &check) == 0);
	CHECK(check.pages_checked * 4096 > LENGTH && check.lost_pages == 0);
	CHECK(vellum_store_check(store, VELLUM_FREE_LOST, NULL, NULL, &check) == 0);
	left = 2;
	CHECK(vellum_store_check(store, 0, count_calls, &left, &check) == -ECANCELED);
	left = 2;
	CHECK(vellum_store_check(store, VELLUM_FREE_LOST, count_calls, &left, &check) ==
	      -ECANCELED);
	CHECK(vellum_store_check(store, VELLUM_CREATE, NULL, NULL, &check) == -EINVAL);
	CHECK(vellum_store_check(store, 0, NULL, NULL, NULL) == -EINVAL);

	CHECK(vellum_tree_remove(tree, "long", 4) == 0);
	CHECK(vellum_store_sync(store) == 0 && stat("kept", &before) == 0);
	CHECK(vellum_store_compact(store, NULL, NULL) == 0);
	CHECK(stat("kept", &after) == 0 && after.st_size < before.st_size / 2);
	CHECK(vellum_store_compact(NULL, NULL, NULL) == -EINVAL);

	CHECK(vellum_control_socket_open(store, "full", &socket) == -EINVAL);
	CHECK(vellum_control_socket_open(NULL, "kept", &socket) == -EINVAL);
	CHECK(vellum_control_socket_open(store, NULL, &socket) == -EINVAL);
	CHECK(vellum_control_socket_open(store, "kept", NULL) == -EINVAL);
	CHECK(vellum_control_socket_open(store, "kept", &socket) == 0);
	CHECK(stat("kept.control", &after) == 0 && S_ISSOCK(after.st_mode));
	vellum_control_socket_close(socket);
	vellum_control_socket_close(NULL);
	CHECK(stat("kept.control", &after) == -1 && errno == ENOENT);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);

	CHECK(vellum_restore("first", backups, 1, NULL) == 0);
	expect_number("first", "one");
	expect_number("third", "two");
	CHECK(vellum_restore("second", backups, 2, NULL) == 0);
	expect_number("second", "two");
	CHECK(vellum_restore("second", backups, 2, NULL) == -EEXIST);
	CHECK(vellum_restore("other", backups + 1, 1, NULL) == -EBADMSG);
	CHECK(strstr(vellum_last_error(), "increment"));
	CHECK(vellum_restore("other", backups, 0, NULL) == -EINVAL);
	CHECK(vellum_restore("other", NULL, 1, NULL) == -EINVAL);
	options.reserved = 0;
	CHECK(vellum_restore("other", backups, 2, &options) == -EINVAL);
	options = (struct vellum_backup_options){ .flags = VELLUM_READ_ALL };
	CHECK(vellum_restore("other", backups, 2, &options) == -EINVAL);
}

/* Values of 23 times the pool, many times, in a file that keeps its length: no space is lost. */
static void space(void)
{
	vellum_store *store = open_store("space", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store);
	struct stat found;

	for (int round = 0; round < 10; round++) {
		write_value(tree, "key", LENGTH, round);
		vellum_writer_close(begin(tree, "other", LENGTH, round));
	}
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
	CHECK(stat("space", &found) == 0 && (uint64_t)found.st_size < 3 * LENGTH);
}

int main(void)
{
	vellum_store *store;

	CHECK(strcmp(vellum_last_error(), "") == 0);
	store = open_store("main", VELLUM_CREATE);
	streams(store);
	entries(store);
	misuse(store);
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
	threads(store);
	CHECK(vellum_store_close(store) == 0);
	recovery();
	after_close();
	read_only();
	space();
	maintenance();
	puts("ok");
	return 0;
}
