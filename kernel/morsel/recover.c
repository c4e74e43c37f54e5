// SPDX-License-Identifier: GPL-2.0
/*
 * What a device has when it is mounted. First everything is looked at and nothing is changed; what
 * does not add up is refused as a whole. Then tables become what the kernel expects of them.
 *
 * Entries are what processors will walk, so none is believed: it must refer to a page of the device
 * that nothing else refers to, and gets its bits anew.
 */

#include <linux/sched.h>

#include "core/compat.h"
#include "morsel/device.h"
#include "morsel/morsel.h"

struct walk {
	struct morsel_device	*device;
	const struct morsel_slot *slot;
	u64			page;		/* that the entry is for; the first of them */
	/* Called for a table before what is below it; false ends the walk. */
	bool	(*table)(struct walk *walk, u64 *table, unsigned int level);
	bool	(*leaf)(struct walk *walk, u64 *leaf);
	u64			tables;		/* that were constructed, or are to be destructed */
};

static unsigned int levels_of(const struct morsel_slot *slot)
{
	return slot->order ?: 1;
}

/*
 * What an entry is where there is nothing. At level 3 that is the guard: none is damage, as the table
 * is durable with guards before a slot leads to it, and the core would put a table of its own there.
 */
static bool is_nothing(const struct walk *walk, u64 entry, u64 index, unsigned int level)
{
	if (level < 3)
		return !entry;
	return morsel_device_page(walk->device, index) == (void *)walk->device->source.guard;
}

static bool walk_below(struct walk *walk, u64 *table, unsigned int level)
{
	u64 first = walk->page;
	unsigned int i;
	u64 index;

	if (!walk->table(walk, table, level))
		return false;
	cond_resched();
	for (i = 0; i < PT_ENTRIES; i++) {
		walk->page = first + i * pt_entry_pages(level);
		index = morsel_device_index(walk->device, table[i]);
		if (is_nothing(walk, table[i], index, level))
			continue;
		if (level == 1 ? !walk->leaf(walk, table + i) :
				 !walk_below(walk, morsel_device_page(walk->device, index), level - 1))
			return false;
	}
	return true;
}

static bool walk_slot(struct walk *walk)
{
	walk->page = 0;
	return walk_below(walk, morsel_device_page(walk->device, walk->slot->root),
			  levels_of(walk->slot));
}

static bool is_claimed_now(struct walk *walk, u64 index, const char *what)
{
	if (morsel_device_claim(walk->device, index))
		return true;
	pr_err("morselfs: '%.64s': page %llu of the device cannot be its %s of page %llu\n",
	       walk->slot->name, index, what, walk->page);
	return false;
}

static bool claim_table(struct walk *walk, u64 *table, unsigned int level)
{
	/* Computed from an entry, which may be anything: compared before it is followed. */
	u64 index = ((void *)table - walk->device->start) >> PAGE_SHIFT;

	return is_claimed_now(walk, index, "table");
}

static bool claim_leaf(struct walk *walk, u64 *leaf)
{
	if (walk->page >= DIV_ROUND_UP(walk->slot->length, PAGE_SIZE)) {
		pr_err("morselfs: '%.64s' has page %llu beyond its length\n", walk->slot->name,
		       walk->page);
		return false;
	}
	return is_claimed_now(walk, morsel_device_index(walk->device, *leaf), "page");
}

static bool is_slot_right(const struct morsel_device *device, const struct morsel_slot *slot)
{
	const struct vellum_morsel_create create = {
		.order = slot->order,
		.length = slot->length,
		.flags = slot->flags,
		.address = slot->address,
	};
	size_t length = strnlen(slot->name, sizeof(slot->name));

	return length && length < sizeof(slot->name) && !strchr(slot->name, '/') &&
	       S_ISREG(slot->mode) && strcmp(slot->name, ".") && strcmp(slot->name, "..") &&
	       (!slot->root || morsel_shape_is_right(&create, true));
}

static int claim_slot(struct morsel_device *device, const struct morsel_slot *slot)
{
	struct walk walk = {
		.device = device, .slot = slot, .table = claim_table, .leaf = claim_leaf,
	};

	if (!is_slot_right(device, slot)) {
		pr_err("morselfs: slot %zd of the device is damaged\n", slot - device->slots);
		return -EUCLEAN;
	}
	return !slot->root || walk_slot(&walk) ? 0 : -EUCLEAN;
}

static bool renew_leaf(struct walk *walk, u64 *leaf)
{
	u64 value = (*leaf & PTE_PFN_MASK) | PT_LEAF_FLAGS | _PAGE_SPECIAL;

	if (*leaf != value) {
		WRITE_ONCE(*leaf, value);
		morsel_persist(leaf, sizeof(*leaf));
	}
	return true;
}

static bool renew_entries(struct walk *walk, u64 *table, unsigned int level)
{
	unsigned int i;

	for (i = 0; level > 1 && i < PT_ENTRIES; i++)
		if (table[i])
			WRITE_ONCE(table[i], (table[i] & PTE_PFN_MASK) | PT_TABLE_FLAGS);
	if (level > 1)
		morsel_persist(table, PAGE_SIZE);
	if (!pt_table_construct(virt_to_page(table), level))
		return false;
	walk->tables++;
	return true;
}

static bool destruct_table(struct walk *walk, u64 *table, unsigned int level)
{
	if (!walk->tables--)
		return false;
	pt_table_destruct(virt_to_page(table), level);
	return true;
}

static bool leave_leaf(struct walk *walk, u64 *leaf)
{
	return true;
}

static void forget(struct morsel_device *device, const struct morsel_slot *slot, u64 tables)
{
	struct walk walk = {
		.device = device, .slot = slot, .table = destruct_table, .leaf = leave_leaf,
		.tables = tables,
	};

	walk_slot(&walk);
}

void morsel_device_forget_tables(struct morsel_device *device, struct morsel_slot *slot)
{
	forget(device, slot, U64_MAX);
}

static int adopt_slot(struct morsel_device *device, const struct morsel_slot *slot)
{
	struct walk walk = {
		.device = device, .slot = slot, .table = renew_entries, .leaf = renew_leaf,
	};

	if (walk_slot(&walk))
		return 0;
	forget(device, slot, walk.tables);
	return -ENOMEM;
}

int morsel_device_recover(struct morsel_device *device)
{
	struct morsel_slot *slot, *end = device->slots + device->super->slots;
	int error = 0;

	for (slot = device->slots; !error && slot < end; slot++) {
		if (!slot->is_used)
			continue;
		__set_bit(slot - device->slots, device->named);
		error = claim_slot(device, slot);
	}
	if (error)
		return error;
	for (slot = device->slots; slot < end; slot++) {
		if (!slot->is_used || !slot->root)
			continue;
		error = adopt_slot(device, slot);
		if (error)
			break;
	}
	while (error && slot-- > device->slots)
		if (slot->is_used && slot->root)
			morsel_device_forget_tables(device, slot);
	return error;
}
