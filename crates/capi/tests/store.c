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

#define CHECK(condition)                                                                   \
	do {                                                                               \
		if (!(condition)) {                                                        \
			fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__,         \
				#condition, vellum_last_error());                          \
			exit(1);                                                           \
		}                                                                          \
	} while (0)

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
	options.flags = VELLUM_LOG | VELLUM_READ_ONLY;
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
		store = open_store("logged", VELLUM_CREATE | VELLUM_LOG);
		tree = open_tree(store);
		one = begin_transaction(store, 0);
		CHECK(put_in(one, tree, "x", 5, 0) == 0 && vellum_transaction_commit(one) == 0);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	store = open_store("logged", VELLUM_LOG);
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
	threads(store);
	CHECK(vellum_store_close(store) == 0);
	recovery();
	after_close();
	read_only();
	space();
	puts("ok");
	return 0;
}
