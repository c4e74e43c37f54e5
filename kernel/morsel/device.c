// SPDX-License-Identifier: GPL-2.0
/* Persistent memory: taken, given back, written back. device.h describes the layout. */

#include <linux/bitmap.h>
#include <linux/dax.h>
#include <linux/highmem.h>
#include <linux/libnvdimm.h>
#include <linux/memremap.h>
#include <linux/pfn_t.h>
#include <linux/slab.h>
#include <linux/wait_bit.h>

#include "core/compat.h"
#include "morsel/device.h"

#define MORSEL_GUARD_INDEX	1
#define MORSEL_SLOTS_INDEX	2
/* One slot for so many pages of the device, but at least a page of slots. */
#define MORSEL_PAGES_PER_SLOT	64

void morsel_persist(const void *address, size_t length)
{
	arch_wb_cache_pmem((void *)address, length);
	/* Durable before all later writes. */
	pmem_wmb();
}

static struct page *morsel_device_struct_page(const struct morsel_device *device, u64 index)
{
	return virt_to_page(morsel_device_page(device, index));
}

/* Frees the held pages that nothing refers to any more. The lock is held. */
static void morsel_device_look_at_held(struct morsel_device *device)
{
	u64 index;

	for_each_set_bit(index, device->held, device->pages) {
		if (page_ref_count(morsel_device_struct_page(device, index)) != 1)
			continue;
		__clear_bit(index, device->held);
		__clear_bit(index, device->used);
		device->held_count--;
	}
}

/*
 * Returns the index of a free page, beginning where the last one was found; device->pages: there is
 * none.
 */
static u64 morsel_device_find_free(const struct morsel_device *device)
{
	u64 index = find_next_zero_bit(device->used, device->pages, device->next);

	if (index < device->pages)
		return index;
	return find_next_zero_bit(device->used, device->pages, device->first);
}

struct page *morsel_device_take(struct morsel_device *device)
{
	u64 index;
	void *page;

	spin_lock(&device->lock);
	index = morsel_device_find_free(device);
	if (unlikely(index >= device->pages && device->held_count)) {
		morsel_device_look_at_held(device);
		index = morsel_device_find_free(device);
	}
	if (index < device->pages) {
		__set_bit(index, device->used);
		device->next = index + 1;
	}
	spin_unlock(&device->lock);
	if (index >= device->pages)
		return NULL;
	page = morsel_device_page(device, index);
	clear_page(page);
	morsel_persist(page, PAGE_SIZE);
	return virt_to_page(page);
}

void morsel_device_give(struct morsel_device *device, struct page *page)
{
	u64 index = morsel_device_index(device, page_to_phys(page));

	spin_lock(&device->lock);
	WARN_ON_ONCE(!test_bit(index, device->used));
	if (page_ref_count(page) == 1) {
		__clear_bit(index, device->used);
	} else {
		__set_bit(index, device->held);
		device->held_count++;
	}
	spin_unlock(&device->lock);
}

bool morsel_device_claim(struct morsel_device *device, u64 index)
{
	return index >= device->first && index < device->pages &&
	       !__test_and_set_bit(index, device->used);
}

/*
 * Counts the used pages, before the device is in use. The kernel's own function counts in 32 bits.
 */
u64 morsel_device_used(struct morsel_device *device)
{
	u64 used = 0, i;

	for (i = 0; i < BITS_TO_LONGS(device->pages); i++)
		used += hweight_long(device->used[i]);
	return used - device->first;
}

static struct morsel_device *morsel_device_of(struct pt_source *source)
{
	return container_of(source, struct morsel_device, source);
}

static pteval_t *morsel_device_alloc_table(struct pt_source *source, unsigned int level)
{
	struct morsel_device *device = morsel_device_of(source);
	struct page *page = morsel_device_take(device);

	if (page && !pt_table_construct(page, level)) {
		morsel_device_give(device, page);
		page = NULL;
	}
	return page ? page_address(page) : NULL;
}

static void morsel_device_free_table(struct pt_source *source, pteval_t *table, unsigned int level)
{
	struct page *page = virt_to_page(table);

	pt_table_destruct(page, level);
	morsel_device_give(morsel_device_of(source), page);
}

static u64 morsel_device_slot_pages(u64 pages)
{
	return DIV_ROUND_UP(pages / MORSEL_PAGES_PER_SLOT * sizeof(struct morsel_slot),
			    PAGE_SIZE) ?: 1;
}

static u64 morsel_device_slot_count(u64 pages)
{
	return morsel_device_slot_pages(pages) * PAGE_SIZE / sizeof(struct morsel_slot);
}

/* Formats the device. The magic is written last: without it the device is not formatted. */
static void morsel_device_format(struct morsel_device *device)
{
	struct morsel_super *super = device->super;

	super->magic = 0;
	morsel_persist(super, sizeof(super->magic));
	memset(morsel_device_page(device, MORSEL_SLOTS_INDEX), 0,
	       morsel_device_slot_pages(device->pages) * PAGE_SIZE);
	morsel_persist(morsel_device_page(device, MORSEL_SLOTS_INDEX),
		       morsel_device_slot_pages(device->pages) * PAGE_SIZE);
	super->version = MORSEL_DEVICE_VERSION;
	super->pages = device->pages;
	super->slots = morsel_device_slot_count(device->pages);
	super->address = page_to_phys(virt_to_page(device->start));
	morsel_persist(super, sizeof(*super));
	super->magic = MORSEL_DEVICE_MAGIC;
	morsel_persist(super, sizeof(super->magic));
}

static int morsel_device_check_super(const struct morsel_device *device)
{
	const struct morsel_super *super = device->super;

	if (super->magic != MORSEL_DEVICE_MAGIC) {
		pr_err("morselfs: the device is not formatted; the option 'format' erases and formats it\n");
		return -EINVAL;
	}
	if (super->version != MORSEL_DEVICE_VERSION) {
		pr_err("morselfs: the device has the unknown version %llu\n", super->version);
		return -EINVAL;
	}
	if (super->pages != device->pages ||
	    super->slots != morsel_device_slot_count(device->pages)) {
		pr_err("morselfs: the device had %llu pages and has %llu\n", super->pages,
		       device->pages);
		return -EINVAL;
	}
	if (super->address != page_to_phys(virt_to_page(device->start))) {
		pr_err("morselfs: the device is no longer at physical address %#llx\n",
		       super->address);
		return -EINVAL;
	}
	return 0;
}

/*
 * The driver is about to wait: see morsel_device_find_memory(). This module cannot handle memory
 * errors.
 */
static int morsel_device_driver_goes(struct dax_device *dax, u64 offset, u64 length, int flags)
{
	if (length == U64_MAX)
		pr_notice("morselfs: the driver waits until the device is unmounted\n");
	return -EOPNOTSUPP;
}

static const struct dax_holder_operations morsel_device_holder_ops = {
	.notify_failure = morsel_device_driver_goes,
};

/*
 * Finds the device's memory. All of it must be in a row, and have descriptors of its pages. It
 * stays until the device is unmounted: a driver that is unbound waits for the reference to the
 * descriptors.
 */
static int morsel_device_find_memory(struct morsel_device *device)
{
	struct block_device *bdev = vellum_bdev_get(device->bdev);
	u64 pages = bdev_nr_bytes(bdev) >> PAGE_SHIFT;
	u64 offset;
	pfn_t pfn;
	long found;
	int id;

	device->dax = fs_dax_get_by_bdev(bdev, &offset, device, &morsel_device_holder_ops);
	if (!device->dax) {
		pr_err("morselfs: the device is not persistent memory in fsdax mode\n");
		return -EOPNOTSUPP;
	}
	id = dax_read_lock();
	found = dax_direct_access(device->dax, offset >> PAGE_SHIFT, pages, DAX_ACCESS,
				  &device->start, &pfn);
	dax_read_unlock(id);
	if (found < 0)
		return found;
	if (found < pages || !pfn_t_has_page(pfn)) {
		pr_err("morselfs: only %ld of %llu pages of the device are contiguous\n",
		       found, pages);
		return -EIO;
	}
	device->descriptors = get_dev_pagemap(pfn_t_to_pfn(pfn), NULL);
	if (!device->descriptors)
		return -ENODEV;
	device->pages = pages;
	return 0;
}

/* Makes the guard. CPUs walk it, so the old content of its page is cleared unread. */
static int morsel_device_make_guard(struct morsel_device *device)
{
	pteval_t *guard = morsel_device_page(device, MORSEL_GUARD_INDEX);

	clear_page(guard);
	morsel_persist(guard, PAGE_SIZE);
	device->source.guard = guard;
	return pt_table_construct(virt_to_page(guard), PG_LEVEL_2M) ? 0 : -ENOMEM;
}

/* Makes a bitmap. The kernel's own bitmaps end at 4 MiB, which covers 128 GiB. */
static unsigned long *morsel_device_make_map(u64 bits)
{
	return kvcalloc(BITS_TO_LONGS(bits), sizeof(unsigned long), GFP_KERNEL);
}

static int morsel_device_make_maps(struct morsel_device *device)
{
	device->slots = morsel_device_page(device, MORSEL_SLOTS_INDEX);
	device->used = morsel_device_make_map(device->pages);
	device->held = morsel_device_make_map(device->pages);
	device->named = morsel_device_make_map(device->super->slots);
	if (!device->used || !device->held || !device->named)
		return -ENOMEM;
	bitmap_set(device->used, 0, device->first);
	device->next = device->first;
	return 0;
}

static int morsel_device_init(struct morsel_device *device, bool format)
{
	int error = morsel_device_find_memory(device);

	if (error)
		return error;
	device->first = MORSEL_SLOTS_INDEX + morsel_device_slot_pages(device->pages);
	if (device->pages < device->first + 2)
		return -ENOSPC;
	device->super = device->start;
	if (format)
		morsel_device_format(device);
	error = morsel_device_check_super(device);
	if (error)
		return error;
	error = morsel_device_make_maps(device);
	if (error)
		return error;
	return morsel_device_make_guard(device);
}

static void morsel_device_free(struct morsel_device *device)
{
	put_dev_pagemap(device->descriptors);
	if (device->dax)
		fs_put_dax(device->dax, device);
	if (device->bdev)
		vellum_bdev_close(device->bdev);
	kvfree(device->used);
	kvfree(device->held);
	kvfree(device->named);
	kvfree(device);
}

struct morsel_device *morsel_device_open(const char *path, bool format)
{
	struct morsel_device *device = kvzalloc(sizeof(*device), GFP_KERNEL);
	int error;

	if (!device)
		return ERR_PTR(-ENOMEM);
	spin_lock_init(&device->lock);
	device->source.alloc = morsel_device_alloc_table;
	device->source.free = morsel_device_free_table;
	device->bdev = vellum_bdev_open(path, device);
	error = PTR_ERR_OR_ZERO(device->bdev);
	if (error)
		device->bdev = NULL;
	else
		error = morsel_device_init(device, format);
	if (error) {
		morsel_device_free(device);
		return ERR_PTR(error);
	}
	error = morsel_device_recover(device);
	if (error) {
		morsel_device_close(device);
		return ERR_PTR(error);
	}
	return device;
}

/*
 * Waits until nothing has references to pages that were given back: their memory goes with the
 * device.
 */
static void morsel_device_wait_for_holders(struct morsel_device *device)
{
	struct page *page;
	u64 index;

	for_each_set_bit(index, device->held, device->pages) {
		page = morsel_device_struct_page(device, index);
		wait_var_event(&page->_refcount, page_ref_count(page) == 1);
	}
}

void morsel_device_close(struct morsel_device *device)
{
	morsel_device_wait_for_holders(device);
	/* The core walks page tables under RCU, without locks. */
	synchronize_rcu();
	pt_table_destruct(virt_to_page(device->source.guard), 2);
	morsel_device_free(device);
}
