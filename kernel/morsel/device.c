// SPDX-License-Identifier: GPL-2.0
/* Persistent memory: taken, given back, written back. See device.h for what is where. */

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

#define GUARD_INDEX	1
#define SLOTS_INDEX	2
/* One slot for so many pages of the device, but at least a page of them. */
#define PAGES_PER_SLOT	64

void morsel_persist(const void *address, size_t length)
{
	arch_wb_cache_pmem((void *)address, length);
	/* Durable before anything that is written from here on. */
	pmem_wmb();
}

static struct page *page_of(const struct morsel_device *device, u64 index)
{
	return virt_to_page(morsel_device_page(device, index));
}

/* Nobody's pages are free when nothing has references to them any more. The lock is held. */
static void look_at_held(struct morsel_device *device)
{
	u64 index;

	for_each_set_bit(index, device->held, device->pages) {
		if (page_ref_count(page_of(device, index)) != 1)
			continue;
		__clear_bit(index, device->held);
		__clear_bit(index, device->used);
		device->held_count--;
	}
}

/* The number of a free page, from where the last one was found; that of pages: there is none. */
static u64 find_free(const struct morsel_device *device)
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
	index = find_free(device);
	if (unlikely(index >= device->pages && device->held_count)) {
		look_at_held(device);
		index = find_free(device);
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

/* Before it is used. The kernel's own function counts in 32 bits. */
u64 morsel_device_used(struct morsel_device *device)
{
	u64 used = 0, i;

	for (i = 0; i < BITS_TO_LONGS(device->pages); i++)
		used += hweight_long(device->used[i]);
	return used - device->first;
}

static struct morsel_device *device_of(struct pt_source *source)
{
	return container_of(source, struct morsel_device, source);
}

static u64 *alloc_table(struct pt_source *source, unsigned int level)
{
	struct morsel_device *device = device_of(source);
	struct page *page = morsel_device_take(device);

	if (page && !pt_table_construct(page, level)) {
		morsel_device_give(device, page);
		page = NULL;
	}
	return page ? page_address(page) : NULL;
}

static void free_table(struct pt_source *source, u64 *table, unsigned int level)
{
	struct page *page = virt_to_page(table);

	pt_table_destruct(page, level);
	morsel_device_give(device_of(source), page);
}

static u64 slot_pages(u64 pages)
{
	return DIV_ROUND_UP(pages / PAGES_PER_SLOT * sizeof(struct morsel_slot), PAGE_SIZE) ?: 1;
}

/* The magic comes last: before it there is nothing. */
static void format_device(struct morsel_device *device)
{
	struct morsel_super *super = device->super;

	super->magic = 0;
	morsel_persist(super, sizeof(super->magic));
	memset(morsel_device_page(device, SLOTS_INDEX), 0, slot_pages(device->pages) * PAGE_SIZE);
	morsel_persist(morsel_device_page(device, SLOTS_INDEX),
		       slot_pages(device->pages) * PAGE_SIZE);
	super->version = MORSEL_DEVICE_VERSION;
	super->pages = device->pages;
	super->slots = slot_pages(device->pages) * PAGE_SIZE / sizeof(struct morsel_slot);
	super->address = page_to_phys(virt_to_page(device->start));
	morsel_persist(super, sizeof(*super));
	super->magic = MORSEL_DEVICE_MAGIC;
	morsel_persist(super, sizeof(super->magic));
}

static int check_super(const struct morsel_device *device)
{
	const struct morsel_super *super = device->super;

	if (super->magic != MORSEL_DEVICE_MAGIC) {
		pr_err("morselfs: no Morsels there; the option 'format' makes room for some\n");
		return -EINVAL;
	}
	if (super->version != MORSEL_DEVICE_VERSION) {
		pr_err("morselfs: version %llu of the device is unknown\n", super->version);
		return -EINVAL;
	}
	if (super->pages != device->pages ||
	    super->slots != slot_pages(device->pages) * PAGE_SIZE / sizeof(struct morsel_slot)) {
		pr_err("morselfs: the device had %llu pages and has %llu\n", super->pages,
		       device->pages);
		return -EINVAL;
	}
	if (super->address != page_to_phys(virt_to_page(device->start))) {
		pr_err("morselfs: the device was at %#llx, and now it is elsewhere\n", super->address);
		return -EINVAL;
	}
	return 0;
}

/* The driver is about to wait: see find_memory. Nothing is known about memory errors. */
static int driver_goes(struct dax_device *dax, u64 offset, u64 length, int flags)
{
	if (length == U64_MAX)
		pr_notice("morselfs: the driver lets go of the device when it is unmounted\n");
	return -EOPNOTSUPP;
}

static const struct dax_holder_operations holder_operations = {
	.notify_failure = driver_goes,
};

/*
 * All of the device must be there in a row, and have what the kernel keeps for each page. It stays
 * until it is unmounted: a driver that is unbound waits for the reference to the pages' descriptors.
 */
static int find_memory(struct morsel_device *device)
{
	struct block_device *bdev = own_bdev_get(device->bdev);
	u64 pages = bdev_nr_bytes(bdev) >> PAGE_SHIFT;
	u64 offset;
	pfn_t pfn;
	long found;
	int id;

	device->dax = fs_dax_get_by_bdev(bdev, &offset, device, &holder_operations);
	if (!device->dax) {
		pr_err("morselfs: the device is no persistent memory in mode fsdax\n");
		return -EOPNOTSUPP;
	}
	id = dax_read_lock();
	found = dax_direct_access(device->dax, offset >> PAGE_SHIFT, pages, DAX_ACCESS,
				  &device->start, &pfn);
	dax_read_unlock(id);
	if (found < 0)
		return found;
	if (found < pages || !pfn_t_has_page(pfn)) {
		pr_err("morselfs: only %ld of %llu pages of the device can be had in a row\n", found,
		       pages);
		return -EIO;
	}
	device->descriptors = get_dev_pagemap(pfn_t_to_pfn(pfn), NULL);
	if (!device->descriptors)
		return -ENODEV;
	device->pages = pages;
	return 0;
}

/* Processors walk the guard: what the device has there is not looked at, but gone. */
static int make_guard(struct morsel_device *device)
{
	u64 *guard = morsel_device_page(device, GUARD_INDEX);

	clear_page(guard);
	morsel_persist(guard, PAGE_SIZE);
	device->source.guard = guard;
	return pt_table_construct(virt_to_page(guard), 2) ? 0 : -ENOMEM;
}

/* A bit for each of so many. The kernel's own bitmaps end at 4 MiB, those of 128 GiB. */
static unsigned long *make_map(u64 bits)
{
	return kvcalloc(BITS_TO_LONGS(bits), sizeof(unsigned long), GFP_KERNEL);
}

static int make_maps(struct morsel_device *device)
{
	device->slots = morsel_device_page(device, SLOTS_INDEX);
	device->used = make_map(device->pages);
	device->held = make_map(device->pages);
	device->named = make_map(device->super->slots);
	if (!device->used || !device->held || !device->named)
		return -ENOMEM;
	bitmap_set(device->used, 0, device->first);
	device->next = device->first;
	return 0;
}

static int open_device(struct morsel_device *device, bool format)
{
	int error = find_memory(device);

	if (error)
		return error;
	device->first = SLOTS_INDEX + slot_pages(device->pages);
	if (device->pages < device->first + 2)
		return -ENOSPC;
	device->super = device->start;
	if (format)
		format_device(device);
	error = check_super(device);
	if (error)
		return error;
	error = make_maps(device);
	if (error)
		return error;
	return make_guard(device);
}

static void free_device(struct morsel_device *device)
{
	put_dev_pagemap(device->descriptors);
	if (device->dax)
		fs_put_dax(device->dax, device);
	if (device->bdev)
		own_bdev_close(device->bdev);
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
	device->source.alloc = alloc_table;
	device->source.free = free_table;
	device->bdev = own_bdev_open(path, device);
	error = PTR_ERR_OR_ZERO(device->bdev);
	if (error)
		device->bdev = NULL;
	else
		error = open_device(device, format);
	if (error) {
		free_device(device);
		return ERR_PTR(error);
	}
	error = morsel_device_recover(device);
	if (error) {
		morsel_device_close(device);
		return ERR_PTR(error);
	}
	return device;
}

/* Whoever has references to nobody's pages has them for as long as the device is there. */
static void wait_for_holders(struct morsel_device *device)
{
	struct page *page;
	u64 index;

	for_each_set_bit(index, device->held, device->pages) {
		page = page_of(device, index);
		wait_var_event(&page->_refcount, page_ref_count(page) == 1);
	}
}

void morsel_device_close(struct morsel_device *device)
{
	wait_for_holders(device);
	/* The core walks page tables under RCU, without locks. */
	synchronize_rcu();
	pt_table_destruct(virt_to_page(device->source.guard), 2);
	free_device(device);
}
