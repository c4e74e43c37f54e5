// SPDX-License-Identifier: GPL-2.0
/*
 * Recovers the content of a device when it is mounted. The first pass reads everything and changes
 * nothing, and refuses the device as a whole if something is wrong. The second pass sets tables up
 * for the kernel.
 *
 * CPUs will walk the entries, so the code trusts none of them. Each must refer to a page of the
 * device that no other entry refers to, and gets its bits anew.
 */

#include <linux/sched.h>

#include "core/compat.h"
#include "morsel/device.h"
#include "morsel/morsel.h"

struct morsel_walk {
	struct morsel_device	*device;
	const struct morsel_slot *slot;
	u64			page;		/* the first page that the entry covers */
	/* Called for a table before the tables below it. False ends the walk. */
	bool	(*table)(struct morsel_walk *walk, pteval_t *table, unsigned int level);
	bool	(*leaf)(struct morsel_walk *walk, pteval_t *leaf);
	u64			tables;		/* constructed so far, or still to be destructed */
};

static unsigned int morsel_slot_levels(const struct morsel_slot *slot)
{
	return slot->order ?: 1;
}

/*
 * Whether the entry stands for nothing. At level 3 that is the guard, and none is damage: the table
 * is durable with guards before a slot leads to it, and the core would put a table of its own
 * there.
 */
static bool morsel_walk_is_nothing(const struct morsel_walk *walk, pteval_t entry, u64 index,
				   unsigned int level)
{
	if (level < PG_LEVEL_1G)
		return !entry;
	return morsel_device_page(walk->device, index) == (void *)walk->device->source.guard;
}

static bool morsel_walk_below(struct morsel_walk *walk, pteval_t *table, unsigned int level)
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
		if (morsel_walk_is_nothing(walk, table[i], index, level))
			continue;
		if (level == PG_LEVEL_4K ? !walk->leaf(walk, table + i) :
				 !morsel_walk_below(walk, morsel_device_page(walk->device, index),
						    level - 1))
			return false;
	}
	return true;
}

static bool morsel_walk_slot(struct morsel_walk *walk)
{
	walk->page = 0;
	return morsel_walk_below(walk, morsel_device_page(walk->device, walk->slot->root),
				 morsel_slot_levels(walk->slot));
}

static bool morsel_walk_claim(struct morsel_walk *walk, u64 index, const char *what)
{
	if (morsel_device_claim(walk->device, index))
		return true;
	pr_err("morselfs: '%.64s': page %llu of the device cannot be its %s of page %llu\n",
	       walk->slot->name, index, what, walk->page);
	return false;
}

static bool morsel_claim_table(struct morsel_walk *walk, pteval_t *table, unsigned int level)
{
	/*
	 * The pointer comes from an entry, which may be anything. It is checked before it is
	 * followed.
	 */
	u64 index = ((void *)table - walk->device->start) >> PAGE_SHIFT;

	return morsel_walk_claim(walk, index, "table");
}

static bool morsel_claim_leaf(struct morsel_walk *walk, pteval_t *leaf)
{
	if (walk->page >= DIV_ROUND_UP(walk->slot->length, PAGE_SIZE)) {
		pr_err("morselfs: '%.64s' has page %llu beyond its length\n", walk->slot->name,
		       walk->page);
		return false;
	}
	return morsel_walk_claim(walk, morsel_device_index(walk->device, *leaf), "page");
}

static bool morsel_slot_is_right(const struct morsel_device *device, const struct morsel_slot *slot)
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

static int morsel_claim_slot(struct morsel_device *device, const struct morsel_slot *slot)
{
	struct morsel_walk walk = {
		.device = device,
		.slot = slot,
		.table = morsel_claim_table,
		.leaf = morsel_claim_leaf,
	};

	if (!morsel_slot_is_right(device, slot)) {
		pr_err("morselfs: slot %zd of the device is damaged\n", slot - device->slots);
		return -EUCLEAN;
	}
	return !slot->root || morsel_walk_slot(&walk) ? 0 : -EUCLEAN;
}

static bool morsel_renew_leaf(struct morsel_walk *walk, pteval_t *leaf)
{
	pteval_t value = (*leaf & PTE_PFN_MASK) | PT_LEAF_FLAGS | _PAGE_SPECIAL;

	if (*leaf != value) {
		WRITE_ONCE(*leaf, value);
		morsel_persist(leaf, sizeof(*leaf));
	}
	return true;
}

static bool morsel_renew_entries(struct morsel_walk *walk, pteval_t *table, unsigned int level)
{
	unsigned int i;

	for (i = 0; level > PG_LEVEL_4K && i < PT_ENTRIES; i++)
		if (table[i])
			WRITE_ONCE(table[i], (table[i] & PTE_PFN_MASK) | PT_TABLE_FLAGS);
	if (level > PG_LEVEL_4K)
		morsel_persist(table, PAGE_SIZE);
	if (!pt_table_construct(virt_to_page(table), level))
		return false;
	walk->tables++;
	return true;
}

static bool morsel_destruct_table(struct morsel_walk *walk, pteval_t *table, unsigned int level)
{
	if (!walk->tables--)
		return false;
	pt_table_destruct(virt_to_page(table), level);
	return true;
}

static bool morsel_leave_leaf(struct morsel_walk *walk, pteval_t *leaf)
{
	return true;
}

static void morsel_forget_tables(struct morsel_device *device, const struct morsel_slot *slot,
				 u64 tables)
{
	struct morsel_walk walk = {
		.device = device,
		.slot = slot,
		.table = morsel_destruct_table,
		.leaf = morsel_leave_leaf,
		.tables = tables,
	};

	morsel_walk_slot(&walk);
}

void morsel_device_forget_tables(struct morsel_device *device, struct morsel_slot *slot)
{
	morsel_forget_tables(device, slot, U64_MAX);
}

static int morsel_adopt_slot(struct morsel_device *device, const struct morsel_slot *slot)
{
	struct morsel_walk walk = {
		.device = device,
		.slot = slot,
		.table = morsel_renew_entries,
		.leaf = morsel_renew_leaf,
	};

	if (morsel_walk_slot(&walk))
		return 0;
	morsel_forget_tables(device, slot, walk.tables);
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
		error = morsel_claim_slot(device, slot);
	}
	if (error)
		return error;
	for (slot = device->slots; slot < end; slot++) {
		if (!slot->is_used || !slot->root)
			continue;
		error = morsel_adopt_slot(device, slot);
		if (error)
			break;
	}
	while (error && slot-- > device->slots)
		if (slot->is_used && slot->root)
			morsel_device_forget_tables(device, slot);
	return error;
}
