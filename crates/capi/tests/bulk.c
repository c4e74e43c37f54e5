/*
 * The functions of vellum.h for many entries at a time: loads, and lookups of many keys. On stores in the
 * current folder; prints "ok" at the end.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vellum.h"

#define LAST_ERROR vellum_last_error
#include "check.h"

#define POOL (1 << 20)
#define MANY 60000      /* entries that take ten times the pool */
#define LONG (5 * POOL) /* the length of a value */

static vellum_store *open_store(const char *name, uint32_t flags)
{
	struct vellum_store_options options = { .pool_bytes = POOL, .flags = flags };
	vellum_store *store = NULL;

	CHECK(vellum_store_open(name, &options, &store) == 0 && store);
	return store;
}

static vellum_tree *open_tree(const vellum_store *store, const char *name)
{
	vellum_tree *tree = NULL;

	CHECK(vellum_tree_open(store, name, VELLUM_CREATE, &tree) == 0 && tree);
	return tree;
}

static vellum_load *begin(const vellum_tree *tree)
{
	vellum_load *load = NULL;

	CHECK(vellum_load_open(tree, &load) == 0 && load);
	return load;
}

static int add(const vellum_load *load, const char *key, const char *value)
{
	return vellum_load_add(load, key, strlen(key), value, strlen(value));
}

/* Keys in the order of their numbers, and values of about 150 bytes. */
static void make(int i, char key[20], char value[200])
{
	snprintf(key, 20, "key %09d", i);
	snprintf(value, 200, "%0150d", i);
}

static int add_number(const vellum_load *load, int i)
{
	char key[20], value[200];

	make(i, key, value);
	return add(load, key, value);
}

static int is_empty(const vellum_tree *tree)
{
	vellum_cursor *cursor = NULL;
	struct vellum_entry entry;
	int error;

	CHECK(vellum_tree_scan(tree, NULL, &cursor) == 0);
	error = vellum_cursor_next(cursor, &entry);
	CHECK(error == 0 || error == -ENODATA);
	vellum_cursor_close(cursor);
	return error == -ENODATA;
}

/* The tree has the first `count` numbers, and nothing else. */
static void expect(const vellum_tree *tree, int count)
{
	vellum_cursor *cursor = NULL;
	struct vellum_entry entry;
	char key[20], value[200];

	CHECK(vellum_tree_scan(tree, NULL, &cursor) == 0);
	for (int i = 0; i < count; i++) {
		make(i, key, value);
		CHECK(vellum_cursor_next(cursor, &entry) == 0);
		CHECK(entry.key_length == strlen(key) && entry.value_length == strlen(value));
		CHECK(memcmp(entry.key, key, entry.key_length) == 0);
		CHECK(memcmp(entry.value, value, entry.value_length) == 0);
	}
	CHECK(vellum_cursor_next(cursor, &entry) == -ENODATA);
	vellum_cursor_close(cursor);
}

/* The file is sound, and has no page that nothing refers to. */
static void expect_sound(const vellum_store *store)
{
	struct vellum_check check;

	CHECK(vellum_store_sync(store) == 0);
	CHECK(vellum_store_check(store, 0, NULL, NULL, &check) == 0 && check.lost_pages == 0);
}

/* A tree that is larger than the pool. Nothing of it is there until the end. */
static void larger_than_the_pool(void)
{
	vellum_store *store = open_store("large", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store, "t");
	vellum_load *load = begin(tree);

	for (int i = 0; i < MANY; i++) {
		CHECK(add_number(load, i) == 0);
		if (i % 20000 == 0)
			CHECK(vellum_store_sync(store) == 0 && is_empty(tree));
	}
	CHECK(vellum_load_finish(load) == 0);
	vellum_load_close(load);
	expect(tree, MANY);
	expect_sound(store);
	/* The tree is one like others. */
	CHECK(vellum_load_open(tree, &load) == -ENOTEMPTY);
	CHECK(vellum_tree_put(tree, "key 000000000", 13, "new", 3, VELLUM_NEW) == -EEXIST);
	CHECK(vellum_tree_remove(tree, "key 000000007", 13) == 0);
	CHECK(vellum_tree_put(tree, "key 000000007", 13, "7", 1, VELLUM_NEW) == 0);
	CHECK(vellum_tree_remove(tree, "key 000000007", 13) == 0);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

static void after_reopening(void)
{
	vellum_store *store = open_store("large", 0);
	vellum_tree *tree = open_tree(store, "t");
	char key[20], value[200];

	make(7, key, value);
	CHECK(vellum_tree_put(tree, key, strlen(key), value, strlen(value), VELLUM_NEW) == 0);
	expect(tree, MANY);
	expect_sound(store);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

/* Keys and values of all lengths: the empty ones, and a value of five times the pool. */
static void lengths(vellum_store *store)
{
	vellum_tree *tree = open_tree(store, "lengths");
	vellum_load *load = begin(tree);
	size_t lengths[] = { 0, 1, 1000, 5000, 300000, LONG };
	unsigned char *bytes = malloc(LONG + 6), *found = malloc(LONG);
	vellum_reader *reader;
	size_t count;
	char key = 'a';

	CHECK(bytes && found);
	for (size_t i = 0; i < LONG + 6; i++)
		bytes[i] = (i * 0x9e3779b97f4a7c15ull) >> 40;
	CHECK(vellum_load_add(load, NULL, 0, NULL, 0) == 0);
	for (size_t i = 0; i < 6; i++, key++)
		CHECK(vellum_load_add(load, &key, 1, bytes + i, lengths[i]) == 0);
	CHECK(vellum_load_finish(load) == 0);
	vellum_load_close(load);
	CHECK(vellum_reader_open(tree, NULL, 0, &reader) == 0 && vellum_reader_length(reader) == 0);
	vellum_reader_close(reader);
	key = 'a';
	for (size_t i = 0; i < 6; i++, key++) {
		CHECK(vellum_reader_open(tree, &key, 1, &reader) == 0);
		CHECK(vellum_reader_read(reader, found, LONG, &count) == 0 && count == lengths[i]);
		CHECK(memcmp(found, bytes + i, count) == 0);
		vellum_reader_close(reader);
	}
	free(bytes);
	free(found);
	vellum_tree_close(tree);
}

/* An entry that is refused ends the load, which says why until it is closed. */
static void refused(vellum_store *store)
{
	const char *wrong[] = { "b", "a", "" }; /* a duplicate, and keys that come too late */
	vellum_tree *tree = open_tree(store, "refused");
	char *long_key = calloc(1, 100000);
	vellum_load *load;

	for (int i = 0; i < 3; i++) {
		load = begin(tree);
		CHECK(add(load, "a\n", "1") == 0 && add(load, "b", "2") == 0);
		CHECK(add(load, wrong[i], "3") == -EINVAL);
		CHECK(strstr(vellum_last_error(), "entry 2"));
		CHECK(*wrong[i] == 0 || strstr(vellum_last_error(), i ? "\"a\"" : "\"b\""));
		CHECK(add(load, "c", "3") == -EINVAL);
		CHECK(vellum_load_finish(load) == -EINVAL);
		CHECK(strstr(vellum_last_error(), "earlier") && strstr(vellum_last_error(), "entry 2"));
		CHECK(vellum_load_finish(load) == -EINVAL);
		vellum_load_close(load);
		CHECK(is_empty(tree));
	}
	load = begin(tree);
	CHECK(long_key && vellum_load_add(load, long_key, 100000, "v", 1) == -ENAMETOOLONG);
	CHECK(vellum_load_finish(load) == -ENAMETOOLONG);
	vellum_load_close(load);
	/* The bytes of a key are compared as numbers from 0 to 255. */
	load = begin(tree);
	CHECK(add(load, "a", "1") == 0 && add(load, "\xff", "2") == 0);
	CHECK(add(load, "b", "3") == -EINVAL);
	vellum_load_close(load);
	free(long_key);
	vellum_tree_close(tree);
}

static void cancelled(vellum_store *store)
{
	vellum_tree *tree = open_tree(store, "cancelled");
	vellum_load *load = begin(tree);
	char *value = calloc(1, LONG);

	for (int i = 0; i < 10000; i++)
		CHECK(add_number(load, i) == 0);
	CHECK(value && vellum_load_add(load, "l", 1, value, LONG) == 0);
	vellum_load_close(load);
	CHECK(is_empty(tree));
	expect_sound(store);
	/* One without entries. */
	vellum_load_close(begin(tree));
	load = begin(tree);
	CHECK(vellum_load_finish(load) == 0 && is_empty(tree));
	CHECK(vellum_load_finish(load) == -EALREADY && add(load, "a", "1") == -EALREADY);
	vellum_load_close(load);
	load = begin(tree);
	CHECK(add_number(load, 0) == 0 && vellum_load_finish(load) == 0);
	CHECK(vellum_load_finish(load) == -EALREADY && add(load, "z", "1") == -EALREADY);
	vellum_load_close(load);
	expect(tree, 1);
	free(value);
	vellum_tree_close(tree);
}

/* Of two loads, or a load and a put, the first one wins. */
static void at_once(vellum_store *store)
{
	vellum_tree *tree = open_tree(store, "at once");
	vellum_load *one = begin(tree), *two = begin(tree);

	for (int i = 0; i < 10000; i++)
		CHECK(add_number(one, i) == 0 && add_number(two, i + 5) == 0);
	CHECK(vellum_load_finish(one) == 0);
	CHECK(vellum_load_finish(two) == -ENOTEMPTY);
	CHECK(vellum_load_finish(two) == -EALREADY);
	expect(tree, 10000);
	vellum_load_close(two);
	vellum_load_close(one);
	vellum_tree_close(tree);

	tree = open_tree(store, "put");
	one = begin(tree);
	CHECK(add_number(one, 1) == 0);
	CHECK(vellum_tree_put(tree, "x", 1, "y", 1, 0) == 0);
	CHECK(add_number(one, 2) == 0 && vellum_load_finish(one) == -ENOTEMPTY);
	vellum_load_close(one);
	/* A tree that has lost its entries is empty again. */
	CHECK(vellum_tree_remove(tree, "x", 1) == 0);
	one = begin(tree);
	CHECK(add_number(one, 0) == 0 && vellum_load_finish(one) == 0);
	vellum_load_close(one);
	expect(tree, 1);
	vellum_tree_close(tree);
}

struct half {
	const vellum_load *load;
	pthread_mutex_t mutex;
	int next;
};

static void *add_some(void *argument)
{
	struct half *half = argument;
	int i = 0;

	while (i < 5000) {
		CHECK(pthread_mutex_lock(&half->mutex) == 0);
		i = half->next++;
		if (i < 5000)
			CHECK(add_number(half->load, i) == 0);
		CHECK(pthread_mutex_unlock(&half->mutex) == 0);
	}
	return NULL;
}

/* Two threads share a load. */
static void threads(vellum_store *store)
{
	vellum_tree *tree = open_tree(store, "threads");
	vellum_load *load = begin(tree);
	struct half half = { load, PTHREAD_MUTEX_INITIALIZER, 0 };
	pthread_t other;

	CHECK(pthread_create(&other, NULL, add_some, &half) == 0);
	add_some(&half);
	CHECK(pthread_join(other, NULL) == 0);
	CHECK(vellum_load_finish(load) == 0);
	vellum_load_close(load);
	expect(tree, 5000);
	vellum_tree_close(tree);
}

static void misuse(vellum_store *store)
{
	vellum_tree *tree = open_tree(store, "misuse");
	vellum_load *load = NULL;

	CHECK(vellum_load_open(NULL, &load) == -EINVAL && !load);
	CHECK(vellum_load_open(tree, NULL) == -EINVAL);
	CHECK(vellum_load_add(NULL, "k", 1, "v", 1) == -EINVAL);
	CHECK(vellum_load_finish(NULL) == -EINVAL);
	vellum_load_close(NULL);
	/* A wrong argument ends a load, too: without the entry it would not be what was meant. */
	load = begin(tree);
	CHECK(add(load, "a", "1") == 0 && vellum_load_add(load, NULL, 1, "v", 1) == -EINVAL);
	CHECK(vellum_load_finish(load) == -EINVAL && strstr(vellum_last_error(), "NULL"));
	vellum_load_close(load);
	load = begin(tree);
	CHECK(vellum_load_add(load, "k", 1, NULL, 1) == -EINVAL);
	vellum_load_close(load);
	load = begin(tree);
	CHECK(vellum_load_add(load, "k", SIZE_MAX, "v", 1) == -EINVAL);
	vellum_load_close(load);
	CHECK(is_empty(tree));
	vellum_tree_close(tree);
}

/* The child of a fork frees a load, and the parent goes on with it. */
static void in_a_child(vellum_store *store)
{
	vellum_tree *tree = open_tree(store, "fork");
	vellum_load *load = begin(tree);
	int status;
	pid_t child;

	for (int i = 0; i < 1000; i++)
		CHECK(add_number(load, i) == 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK(add_number(load, 1000) == -ESHUTDOWN);
		vellum_load_close(load);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(add_number(load, 1000) == 0 && vellum_load_finish(load) == 0);
	vellum_load_close(load);
	expect(tree, 1001);
	vellum_tree_close(tree);
}

/* Opens a store whose process has died. The kernel may take a moment to end that process's writes. */
static vellum_store *open_again(const char *name)
{
	struct vellum_store_options options = { .pool_bytes = POOL };
	vellum_store *store = NULL;
	int error = 0;

	for (int tries = 0; tries < 1000; tries++) {
		error = vellum_store_open(name, &options, &store);
		if (error != -EBUSY)
			break;
		usleep(10000);
	}
	CHECK(error == 0 && store);
	return store;
}

/* A process dies after one load, and within another. */
static void recovery(void)
{
	vellum_store *store;
	vellum_tree *trees[2];
	vellum_load *load;
	int status;
	pid_t child = fork();

	CHECK(child >= 0);
	if (child == 0) {
		store = open_store("logged", VELLUM_CREATE);
		for (int i = 0; i < 2; i++)
			trees[i] = open_tree(store, i ? "within" : "after");
		for (int i = 0; i < 2; i++) {
			load = begin(trees[i]);
			for (int number = 0; number < 20000; number++)
				CHECK(add_number(load, number) == 0);
			if (i == 0)
				CHECK(vellum_load_finish(load) == 0);
			CHECK(vellum_store_sync(store) == 0);
		}
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	store = open_again("logged");
	trees[0] = open_tree(store, "after");
	trees[1] = open_tree(store, "within");
	expect(trees[0], 20000);
	CHECK(is_empty(trees[1]));
	expect_sound(store);
	vellum_tree_close(trees[0]);
	vellum_tree_close(trees[1]);
	CHECK(vellum_store_close(store) == 0);
}

/* Loads that outlive their store. */
static void after_close(void)
{
	vellum_store *store = open_store("closed", VELLUM_CREATE), *again;
	vellum_tree *tree = open_tree(store, "t");
	vellum_load *loads[3], *load = NULL;

	for (int i = 0; i < 3; i++) {
		loads[i] = begin(tree);
		for (int number = 0; number < 1000; number++)
			CHECK(add_number(loads[i], number) == 0);
	}
	CHECK(vellum_store_close(store) == 0);
	again = open_store("closed", 0);
	CHECK(vellum_load_finish(loads[0]) == -ESHUTDOWN);
	CHECK(add(loads[1], "z", "short") == -ESHUTDOWN);
	CHECK(vellum_load_finish(loads[1]) == -ESHUTDOWN && strstr(vellum_last_error(), "closed"));
	CHECK(vellum_load_open(tree, &load) == -ESHUTDOWN && !load);
	vellum_tree_close(tree);
	for (int i = 0; i < 3; i++)
		vellum_load_close(loads[i]);
	tree = open_tree(again, "t");
	CHECK(is_empty(tree));
	expect_sound(again);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(again) == 0);

	again = open_store("closed", VELLUM_READ_ONLY);
	CHECK(vellum_tree_open(again, "t", 0, &tree) == 0);
	CHECK(vellum_load_open(tree, &load) == -EROFS && !load);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(again) == 0);
}

/* Looks up `count` entries in a tree, or in a view of it. */
static vellum_values *look_up(const vellum_tree *tree, const vellum_snapshot *snapshot,
			      const vellum_transaction *transaction, struct vellum_entry *entries,
			      size_t count)
{
	vellum_values *values = NULL;
	int error = snapshot      ? vellum_snapshot_multi_get(snapshot, tree, entries, count, &values)
		    : transaction ? vellum_transaction_multi_get(transaction, tree, entries, count,
								 &values)
				  : vellum_tree_multi_get(tree, entries, count, &values);

	CHECK(error == 0 && values);
	return values;
}

/* Numbers backwards, more of them than the pool holds, and keys that are not there. */
static void many_lookups(void)
{
	vellum_store *store = open_store("large", 0);
	vellum_tree *tree = open_tree(store, "t");
	struct vellum_entry *entries = malloc(2 * MANY * sizeof *entries);
	char(*keys)[20] = malloc(2 * MANY * sizeof *keys), key[20], value[200];
	vellum_snapshot *snapshot;
	vellum_transaction *transaction;
	vellum_values *values[3];

	/* What is not set stays as malloc() has left it. */
	CHECK(entries && keys && vellum_snapshot_open(store, &snapshot) == 0);
	CHECK(vellum_transaction_begin(store, VELLUM_SNAPSHOT, &transaction) == 0);
	for (int view = 0; view < 3; view++) {
		/* A transaction remembers what it reads. */
		int count = view == 2 ? MANY / 10 : 2 * MANY;
		int last = MANY + count / 4;

		for (int i = 0; i < count; i++) {
			make(last - i, keys[i], value);
			entries[i].key = keys[i];
			entries[i].key_length = strlen(keys[i]);
		}
		values[view] = look_up(tree, view == 1 ? snapshot : NULL,
				       view == 2 ? transaction : NULL, entries, count);
		for (int i = 0; i < count; i++) {
			int number = last - i;

			make(number, key, value);
			CHECK(entries[i].key == keys[i]);
			if (number < 0 || number >= MANY) {
				CHECK(!entries[i].value && entries[i].value_length == 0);
				continue;
			}
			CHECK(entries[i].value_length == strlen(value));
			CHECK(memcmp(entries[i].value, value, strlen(value)) == 0);
		}
	}
	for (int view = 0; view < 3; view++)
		vellum_values_close(values[view]);
	free(entries);
	free(keys);
	vellum_transaction_close(transaction);
	vellum_snapshot_close(snapshot);
	vellum_tree_close(tree);
	CHECK(vellum_store_close(store) == 0);
}

/* Each view has its own values. They are there after the store is closed. */
static void values_of_views(void)
{
	vellum_store *store = open_store("views", VELLUM_CREATE);
	vellum_tree *tree = open_tree(store, "t");
	char *bytes = calloc(1, LONG);
	struct vellum_entry entries[] = { { "long", 4, NULL, 7 }, { NULL, 0, "x", 1 },
					  { "none", 4, "x", 1 },  { "a", 1, NULL, 7 },
					  { "b", 1, NULL, 7 },	  { "a", 1, NULL, 7 } };
	const char *expected[] = { "1", "2", "3" };
	vellum_snapshot *snapshot;
	vellum_transaction *transaction;
	vellum_values *values[3], *none = NULL;
	struct vellum_entry after[3][6];

	CHECK(bytes && vellum_tree_put(tree, "a", 1, "1", 1, 0) == 0);
	CHECK(vellum_tree_put(tree, NULL, 0, NULL, 0, 0) == 0);
	CHECK(vellum_tree_put(tree, "long", 4, bytes, LONG, 0) == 0);
	CHECK(vellum_tree_put(tree, "b", 1, bytes, 100000, 0) == 0);
	CHECK(vellum_snapshot_open(store, &snapshot) == 0);
	CHECK(vellum_transaction_begin(store, 0, &transaction) == 0);
	CHECK(vellum_transaction_put(transaction, tree, "a", 1, "2", 1, 0) == 0);
	CHECK(vellum_tree_put(tree, "a", 1, "3", 1, 0) == 0);
	for (int i = 0; i < 3; i++) {
		values[i] = look_up(tree, i == 0 ? snapshot : NULL, i == 1 ? transaction : NULL,
				    entries, 6);
		memcpy(after[i], entries, sizeof entries);
	}
	CHECK(vellum_transaction_multi_get(transaction, tree, NULL, 1, &none) == -EINVAL);
	CHECK(vellum_transaction_multi_get(NULL, tree, entries, 1, &none) == -EINVAL);
	CHECK(vellum_transaction_multi_get(transaction, NULL, entries, 1, &none) == -EINVAL);
	CHECK(vellum_snapshot_multi_get(NULL, tree, entries, 1, &none) == -EINVAL);
	CHECK(vellum_snapshot_multi_get(snapshot, NULL, entries, 1, &none) == -EINVAL);
	CHECK(vellum_tree_multi_get(NULL, entries, 1, &none) == -EINVAL);
	CHECK(vellum_tree_multi_get(tree, entries, 1, NULL) == -EINVAL);
	CHECK(vellum_tree_multi_get(tree, NULL, 1, &none) == -EINVAL);
	CHECK(vellum_tree_multi_get(tree, entries, SIZE_MAX, &none) == -EINVAL && !none);
	CHECK(vellum_tree_multi_get(tree, NULL, 0, &none) == 0 && none);
	vellum_values_close(none);
	none = NULL;
	entries[2].key = NULL;
	CHECK(vellum_tree_multi_get(tree, entries, 6, &none) == -EINVAL && !none);
	entries[2].key_length = 0;
	CHECK(vellum_transaction_commit(transaction) == 0);
	CHECK(vellum_transaction_multi_get(transaction, tree, entries, 6, &none) == -EALREADY);
	CHECK(vellum_store_close(store) == 0);
	CHECK(vellum_tree_multi_get(tree, entries, 6, &none) == -ESHUTDOWN);
	CHECK(vellum_snapshot_multi_get(snapshot, tree, entries, 6, &none) == -ESHUTDOWN && !none);
	for (int i = 0; i < 3; i++) {
		const char *value = expected[i];

		CHECK(!after[i][0].value && after[i][0].value_length == LONG);
		CHECK(after[i][1].value && after[i][1].value_length == 0);
		CHECK(!after[i][2].value && after[i][2].value_length == 0);
		CHECK(after[i][3].value_length == 1 && memcmp(after[i][3].value, value, 1) == 0);
		CHECK(after[i][4].value_length == 100000);
		CHECK(memcmp(after[i][4].value, bytes, 100000) == 0);
		CHECK(after[i][5].value_length == 1 && memcmp(after[i][5].value, value, 1) == 0);
		vellum_values_close(values[i]);
	}
	vellum_values_close(NULL);
	free(bytes);
	vellum_transaction_close(transaction);
	vellum_snapshot_close(snapshot);
	vellum_tree_close(tree);
}

int main(void)
{
	vellum_store *store;

	larger_than_the_pool();
	after_reopening();
	many_lookups();
	values_of_views();
	store = open_store("main", VELLUM_CREATE);
	lengths(store);
	refused(store);
	cancelled(store);
	at_once(store);
	threads(store);
	misuse(store);
	in_a_child(store);
	expect_sound(store);
	CHECK(vellum_store_close(store) == 0);
	recovery();
	after_close();
	puts("ok");
	return 0;
}
